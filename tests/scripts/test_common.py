"""What scripts share: tables that go on, ratios of a machine that drifts, records, commands."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest

from experiments.common import runner
from experiments.common.record import command, difference, write_record
from experiments.common.study import Depth, Study
from experiments.jacobi import study as jacobi
from experiments.recurrent_depth import study as recurrent_depth
from paradec_jax import facts

pytestmark = pytest.mark.slow
STUDIES = recurrent_depth.STUDIES | jacobi.STUDIES


def test_settings_of_a_study_differ():
    for name, one in STUDIES.items():
        for depth in (Depth(16), Depth(16, needed=14)):
            settings = one.settings(depth)
            keys = [runner._key(setting) for setting in settings]
            assert len(set(keys)) == len(keys), name
            assert [setting.baseline for setting in settings] == [True] + [False] * (len(keys) - 1)


def test_a_table_goes_on_where_it_stood(toys, monkeypatch, tmp_path):
    others = [recurrent_depth.wave(1, width) for width in (1, 2)]
    toy = {"toy": Study("toy", lambda depth: others, "window", "inner_recurrence")}
    small = {"problems": 2, "timed": 0, "rows": 2, "budget": 4, "folder": tmp_path / "results"}
    options, decoded, honest = (
        runner.Options(("all",), model=str(toys / "recurrent"), **small),
        [],
        runner.compare,
    )

    def counting(sources, problems, **options):
        decoded.append(len(sources))
        return honest(sources, problems, **options)

    monkeypatch.setattr(runner, "compare", counting)
    runner.main(toy, options)
    path = tmp_path / "results" / "toy-recurrent.json"
    table = json.loads(path.read_text())
    assert (
        len(table["rows"]) == 1 + len(others)
        and table["options"] == options.kept()
        and table["command"]
    )
    assert difference(table["facts"], facts.facts()) is None and table["facts"]["dtypes"] == [
        "float32"
    ]
    assert (tmp_path / "figures" / "toy-recurrent.png").stat().st_size > 1000
    table["rows"].popitem()
    path.write_text(json.dumps(table))
    runner.main(toy, options)
    assert decoded == [1 + len(others), 2]
    with pytest.raises(SystemExit, match="other seed"):
        runner.main(toy, dataclasses.replace(options, seed=3))


@dataclasses.dataclass
class Options:
    seed: int = 3
    model: str = "tiny-causal"
    out: Path = Path("some/where/rows.json")


def test_a_record_tells_of_its_machine_and_its_making(tmp_path, monkeypatch):
    path, rows = tmp_path / "new" / "rows.json", [{"a": 1, "passes": [1.0, 2.0]}]
    write_record(path, Options(), {"rows": rows}, dtypes=["float32", "bfloat16", "float32"])
    table = json.loads(path.read_text())
    assert table["rows"] == rows and table["command"].startswith("python ")
    assert table["options"] == {"seed": 3, "model": "tiny-causal", "out": "rows.json"}
    assert table["facts"].pop("dtypes") == ["bfloat16", "float32"]
    made = facts.facts() | {"commit": None}
    assert difference(table["facts"] | {"commit": None}, made) is None
    other = made | {"device": made["device"] | {"processor": "another"}}
    assert difference(other, made).startswith("device (processor) is ")
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.a.b"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(
        sys, "argv", ["/a/script.py", "two words", "--out=/b/c.json", "/d/e", "x/y"]
    )
    assert command() == "python -m experiments.a.b 'two words' --out=c.json e x/y"
