"""Plans at toy size, by the CPU's compiler on simulated devices: what they tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.systems import plan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def planned(out, words):
    """The record of a plan of a toy model on four simulated devices."""
    words = f"-m experiments.systems.plan test-causal --target cpu:4 --batch 4 --seq 16 {words}"
    command = [sys.executable, *words.split(), "--out", str(out)]
    options = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=600, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_a_train_step_has_a_price(tmp_path, capsys):
    out = tmp_path / "plan.json"
    found = planned(out, "--mesh fsdp=2,tensor=2 --chunk 8")
    (row,) = found["rows"]
    assert found["chips"] == 4 and found["memory"] == "by the CPU's compiler: no plan"
    assert row["program"] == "train step" and row["fits"] and row["gib"] > 0
    # What the backward pass computes anew lies between a forward of the blocks and one of the whole
    # network.
    assert row["work"] < row["products"] < 2 * row["work"]
    assert {"all-reduce", "all-gather"} <= set(row["collectives"])
    assert found["options"]["mesh"] == "fsdp=2,tensor=2"
    plan.main(plan.Options(table=(out, ROOT / "experiments/systems/results/plans.json")))
    head, _, mine, *others = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in (head, mine, *others)} == {len(plan.HEAD) + 1} and others
    assert "| test-causal | train step | 4, fsdp=2,tensor=2 | 4 x 16 |" in mine


def test_a_decoder_has_two_prices_and_a_largest_batch(tmp_path):
    words = "--mesh data=4 --decode jacobi --new 4 --largest"
    found = planned(tmp_path / "plan.json", words)
    names = [(row["program"], row["batch"]) for row in found["rows"]]
    assert names == [("prompt", 4), ("decode step", 4), ("prompt", 8), ("decode step", 8)]
    stop = {"all-reduce": {"count": 1, "bytes": 1}}  # has every row stopped?
    assert found["rows"][1]["collectives"] == stop
    for sizes in found["largest_batch"].values():
        assert 0 < sizes["80 GB"] < sizes["v5p"] < sizes["141 GB"]


def test_the_largest_batch_lies_on_the_line_through_two_plans():
    largest = plan.largest
    one, two = {"gib": 20.0, "batch": 8}, {"gib": 24.0, "batch": 16}
    # 16 GiB whatever the batch, half a GiB a row
    assert largest(one, two, 8) == {"80 GB": 112, "141 GB": 224, "v5p": 152}
    assert set(largest(one | {"gib": 200.0}, two | {"gib": 210.0}, 8).values()) == {0}
