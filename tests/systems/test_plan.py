"""Plans at toy size, by the CPU's compiler on simulated devices: what they tell, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.systems import plan

ROOT = Path(__file__).parents[2]


def planned(out, *words):
    """The record of a plan of a toy model on four simulated devices."""
    words = ("test-causal", "--target", "cpu:4", "--batch", "4", "--seq", "16", "--out", str(out), *words)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.systems.plan", *words],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_a_train_step_has_a_price(tmp_path, capsys):
    out = tmp_path / "plan.json"
    found = planned(out, "--mesh", "fsdp=2,tensor=2", "--chunk", "8")
    (row,) = found["rows"]
    assert found["chips"] == 4 and found["memory"] == "by the CPU's compiler: no plan"
    assert row["program"] == "train step" and row["fits"] and row["gib"] > 0
    # What the backward pass computes anew lies between a forward of the blocks and one of the whole network.
    assert row["work"] < row["products"] < 2 * row["work"]
    assert {"all-reduce", "all-gather"} <= set(row["collectives"])
    assert found["options"]["mesh"] == "fsdp=2,tensor=2"
    plan.main(plan.Options(table=(out, ROOT / "experiments/systems/results/plans.json")))
    head, _, mine, *others = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in (head, mine, *others)} == {len(plan.HEAD) + 1} and len(others) == 43
    assert "| test-causal | train step | 4, fsdp=2,tensor=2 | 4 x 16 |" in mine


@pytest.mark.slow
def test_a_decoder_has_two_prices_and_a_largest_batch(tmp_path):
    found = planned(
        tmp_path / "plan.json", "--mesh", "data=4", "--decode", "jacobi", "--new", "4", "--largest"
    )
    names = [(row["program"], row["batch"]) for row in found["rows"]]
    assert names == [("prompt", 4), ("decode step", 4), ("prompt", 8), ("decode step", 8)]
    assert found["rows"][1]["collectives"] == {
        "all-reduce": {"count": 1, "bytes": 1}
    }  # has every row stopped?
    for sizes in found["largest_batch"].values():
        assert 0 < sizes["80 GB"] < sizes["v5p"] < sizes["141 GB"]


def test_the_largest_batch_lies_on_the_line_through_two_plans():
    largest = plan.largest
    one, two = {"gib": 20.0, "batch": 8}, {"gib": 24.0, "batch": 16}
    # 16 GiB whatever the batch, half a GiB a row
    assert largest(one, two, 8) == {"80 GB": 112, "141 GB": 224, "v5p": 152}
    assert largest(one | {"gib": 200.0}, two | {"gib": 210.0}, 8) == {"80 GB": 0, "141 GB": 0, "v5p": 0}
    # less in all, but arguments that grow by as much
    smaller = one | {"gib": 25.0, "gib_of": {"argument": 4.0}}, two | {"gib_of": {"argument": 8.0}}
    assert largest(*smaller, 8) == {"80 GB": 112, "141 GB": 224, "v5p": 152}


def test_a_program_that_does_not_fit_twice_costs_the_others_nothing():
    rows = [{"program": name, "gib": 20.0, "batch": 8, "products": 1} for name in ("prompt", "decode step")]
    # Of twice the rows there is no step after the prompt.
    twice = [{"program": "prompt", "gib": 24.0, "batch": 16, "products": 1, "fits": False}]
    sizes = plan.largest_of(rows, twice, 8)
    assert sizes == {"prompt": {"80 GB": 112, "141 GB": 224, "v5p": 152}}
    assert plan.largest_of(twice, [], 8) == {}
    idle = [row | {"products": 0} for row in rows]
    assert plan.largest_of(idle, [idle[0] | {"batch": 16}], 8) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.devices_of("h100:8"), "the TPU's compiler does not start for 'h100:8'"),
        (lambda: plan.devices_of("cpu:0"), "target must be like"),
        (lambda: plan.mesh_of_target([1, 2], "fsdp=4"), "needs 4 devices, but the target has 2"),
        (lambda: plan.mesh_of_target([1, 2], "rows=2"), "mesh must be sizes of data, fsdp, tensor"),
        (lambda: plan.Options("gpt"), "preset must be one of"),
        (lambda: plan.Options("test-causal", seq=0), "seq must be at least 1"),
        (
            lambda: plan.Options("test-causal", decode="jacobi", chunk=8),
            "chunk is an option of a train step, not with --decode",
        ),
        (
            lambda: plan.Options("test-causal", new=8),
            "new is an option with --decode, not of a train step",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call, message, monkeypatch):
    monkeypatch.setenv("PARADEC_LAYOUTS", "plain")
    with pytest.raises(ValueError, match=message):
        call()
