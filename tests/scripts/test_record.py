"""What every script writes beside its figures: the command, its options and the machine."""

import ast
import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
from experiment import EXPERIMENTS, read

from experiments.common.record import command, write_record
from paradec_jax import facts

# Written by other means: the checkpoint of a training, its recipe, and one table that is written twice.
OTHERWISE = {
    "common/command.py": {"atomic_write_text"},  # whose folder it is
    "common/watch.py": {"atomic_write_text"},  # the number of a run at Weights & Biases
    "masked_diffusion/held_out.py": {"atomic_write_text"},  # beside a trained model
    "block_diffusion/grounds.py": {"atomic_write_text"},  # likewise
    "block_diffusion/train_head.py": {"atomic_write_text"},  # likewise
    "common/record.py": {"atomic_write_text"},
    "lm_eval/execution.py": {"write_text"},  # the program that is judged
    "lm_eval/run.py": {"atomic_write_text"},  # what lm-eval says
    "systems/report.py": {"atomic_write_text"},  # its table, beside the JSON
}


@dataclasses.dataclass
class Options:
    seed: int = 3
    model: str = "tiny-causal"
    out: Path = Path("some/where/rows.json")


def test_a_record_tells_of_its_machine_and_its_making(tmp_path):
    path = tmp_path / "new" / "rows.json"
    rows = [{"a": 1, "speedup": 2.0, "speedup_interval": [1.5, 2.5], "passes": [1.0, 2.0]}]
    write_record(path, Options(), {"rows": rows}, dtypes=["float32", "bfloat16", "float32"])
    table, _ = read(path)
    assert table["rows"] == rows and table["command"].startswith("python ")
    assert table["options"] == {"seed": 3, "model": "tiny-causal", "out": "rows.json"}
    assert table["facts"].pop("dtypes") == ["bfloat16", "float32"]
    now = facts.facts()
    assert table["facts"].keys() == now.keys()
    ours, theirs = table["facts"].pop("commit"), now.pop("commit")  # "+" tells of changed scripts too, or not
    assert (ours and ours.rstrip("+")) == (theirs and theirs.rstrip("+"))
    assert facts.difference(table["facts"], now) is None
    write_record(
        tmp_path / "alone.json", {"seed": 4, "models": ("/runs/model", "b"), "old": Path("../a")}, {}
    )
    told = json.loads((tmp_path / "alone.json").read_text())["options"]
    assert told == {"seed": 4, "models": ["model", "b"], "old": "a"}


@pytest.mark.parametrize(
    ("module", "expected"),
    [("experiments.a.b", "python -m experiments.a.b"), (None, "python script.py")],
)
def test_a_command_can_be_given_again(monkeypatch, module, expected):
    main = types.SimpleNamespace(__spec__=module and types.SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/a/script.py", "two words", "--out=/b/c.json", "/d/e", "x/y"])
    assert command() == f"{expected} 'two words' --out=c.json e x/y"


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.rglob("*.py")), ids=lambda p: str(p.relative_to(EXPERIMENTS))
)
def test_no_script_writes_or_tells_of_its_machine_by_itself(path):
    name = str(path.relative_to(EXPERIMENTS))
    called = {
        ast.unparse(node.func).rpartition(".")[2]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    }
    writers = {"atomic_write_text", "write_text", "write_lines", "dump"}
    assert called & writers == OTHERWISE.get(name, set())
    assert "device_kind" not in path.read_text(encoding="utf-8")
    assert not called & {"cpu_count", "processor", "sched_getaffinity", "uname"}
