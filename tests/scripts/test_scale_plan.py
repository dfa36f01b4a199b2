"""Plans at toy size, by the CPU's compiler on simulated devices: what they tell, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from experiment import script

ROOT = Path(__file__).parents[2]


def planned(*words):
    """What the command tells of a toy model on four simulated devices."""
    words = (
        "test-causal",
        "--target",
        "cpu:4",
        "--batch",
        "4",
        "--seq",
        "16",
        *words,
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-m", "experiments.systems.scale_plan", *words],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_train_step_has_a_price(tmp_path, capsys):
    out = tmp_path / "plan.json"
    found = planned("--mesh", "fsdp=2,tensor=2", "--chunk", "8", "--out", str(out))
    (row,) = found["rows"]
    assert found["chips"] == 4 and found["memory"] == "by the CPU's compiler: no plan"
    assert row["program"] == "train step" and row["fits"] and row["gib"] > 0
    # What the backward pass computes anew lies between a forward of the blocks and one of the whole network.
    assert row["work"] < row["products"] < 2 * row["work"]
    assert {"all-reduce", "all-gather"} <= set(row["collectives"])
    record = json.loads(out.read_text())
    assert record["rows"] == found["rows"] and record["options"]["mesh"] == "fsdp=2,tensor=2"
    table = script("systems/plan_table", CELLS=[])
    cells = [table["Cell"](preset, 4, 16) for preset in ("test-causal", "test-sdar")]
    table["main"].__globals__["CELLS"] = cells
    out.rename(tmp_path / f"{cells[0].name}.json")
    table["main"](table["Options"](tmp_path))
    head, _, computed, missing = capsys.readouterr().out.splitlines()
    assert head.count("|") == computed.count("|") == missing.count("|")
    assert (
        "| 4, fsdp=2,tensor=2 | 4 x 16 |" in computed and "| 4, fsdp=4 | 4 x 16 | not computed |" in missing
    )


def test_the_table_makes_what_is_missing(monkeypatch, tmp_path):
    table, asked = script("systems/plan_table"), []

    def called(words, check):
        asked.append(words[3:])
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(subprocess, "run", called)
    (tmp_path / "mdlm-8b-train-8.json").write_text('{"rows": [], "largest_batch": {}}')
    (tmp_path / "mdlm-8b-masked-8.json").write_text('{"rows": []}')  # was ended before its second plan
    table["make"](table["Options"](tmp_path, make=True, only=("mdlm-8b",)))
    names = [Path(words[words.index("--out") + 1]).stem for words in asked]
    assert names == [f"mdlm-8b-{what}-{chips}" for chips in (8, 64, 256) for what in ("train", "masked")][1:]
    scale = script("systems/scale_plan")
    for words in asked:
        options = scale["tyro"].cli(scale["Options"], args=words)
        sizes = dict(part.split("=") for part in options.mesh.split(","))
        rows = int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1))
        assert options.batch % rows == 0 and rows * int(sizes.get("tensor", 1)) in table["CHIPS"]
    assert table["Cell"]("huginn-0125", 64, 16).mesh == "data=2,fsdp=32"


@pytest.mark.slow
def test_a_decoder_has_two_prices_and_a_largest_batch():
    found = planned("--mesh", "data=4", "--decode", "jacobi", "--new", "4", "--largest")
    names = [(row["program"], row["batch"]) for row in found["rows"]]
    assert names == [("prompt", 4), ("decode step", 4), ("prompt", 8), ("decode step", 8)]
    assert found["rows"][1]["collectives"] == {
        "all-reduce": {"count": 1, "bytes": 1}
    }  # has every row stopped?
    for sizes in found["largest_batch"].values():
        assert 0 < sizes["80 GB"] < sizes["v5p"] < sizes["141 GB"]


def test_the_largest_batch_lies_on_the_line_through_two_plans():
    largest = script("systems/scale_plan")["largest"]
    one, two = {"gib": 20.0, "batch": 8}, {"gib": 24.0, "batch": 16}
    # 16 GiB whatever the batch, half a GiB a row
    assert largest(one, two, 8) == {"80 GB": 112, "141 GB": 224, "v5p": 152}
    assert largest(one | {"gib": 200.0}, two | {"gib": 210.0}, 8) == {"80 GB": 0, "141 GB": 0, "v5p": 0}
    # less in all, but arguments that grow by as much
    smaller = one | {"gib": 25.0, "gib_of": {"argument": 4.0}}, two | {"gib_of": {"argument": 8.0}}
    assert largest(*smaller, 8) == {"80 GB": 112, "141 GB": 224, "v5p": 152}


def test_a_program_that_does_not_fit_twice_costs_the_others_nothing():
    found = script("systems/scale_plan")
    rows = [{"program": name, "gib": 20.0, "batch": 8, "products": 1} for name in ("prompt", "decode step")]
    # Of twice the rows there is no step after the prompt.
    twice = [{"program": "prompt", "gib": 24.0, "batch": 16, "products": 1, "fits": False}]
    sizes = found["largest_of"](rows, twice, 8)
    assert sizes == {"prompt": {"80 GB": 112, "141 GB": 224, "v5p": 152}}
    assert found["largest_of"](twice, [], 8) == {}
    idle = [row | {"products": 0} for row in rows]
    assert found["largest_of"](idle, [idle[0] | {"batch": 16}], 8) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda found: found["devices_of"]("h100:8"), "the TPU's compiler does not start for 'h100:8'"),
        (lambda found: found["devices_of"]("cpu:0"), "target must be like"),
        (lambda found: found["mesh_of_target"]([1, 2], "fsdp=4"), "needs 4 devices, but the target has 2"),
        (lambda found: found["mesh_of_target"]([1, 2], "rows=2"), "mesh must be sizes of data, fsdp, tensor"),
        (lambda found: found["Options"]("gpt"), "preset must be one of"),
        (lambda found: found["Options"]("test-causal", seq=0), "seq must be at least 1"),
        (
            lambda found: found["Options"]("test-causal", decode="jacobi", chunk=8),
            "chunk is an option of a train step, not with --decode",
        ),
        (
            lambda found: found["Options"]("test-causal", new=8),
            "new is an option with --decode, not of a train step",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call, message, monkeypatch):
    monkeypatch.setenv("PARADEC_LAYOUTS", "plain")
    with pytest.raises(ValueError, match=message):
        call(script("systems/scale_plan"))
