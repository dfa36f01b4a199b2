"""Memory of gradients and of weights, and speed of two checkouts in turns, at toy size."""

import json
from pathlib import Path

import pytest

from experiments.systems import checkouts, memory

ROOT = Path(__file__).parents[2]
TOY = {"width": 16, "feed_forward": 16, "vocab_size": 32, "layers": 1, "heads": 2}
pytestmark = pytest.mark.slow


def test_the_command_measures_every_kind_of_weights(tmp_path):
    out = tmp_path / "rows.json"
    memory.main(memory.Weights(**TOY, folder=tmp_path, out=out))
    told = json.loads(out.read_text())
    assert [row["kind"] for row in told["rows"]] == list(memory.KINDS) and told["same"]
    rows = {row["kind"]: row for row in told["rows"]}
    assert rows["sharded load"]["kept"] >= rows["load"]["kept"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_gradients_of_grouped_steps(tmp_path):
    out = tmp_path / "rows.json"
    memory.main(memory.Gradients("test-recurrent", steps=(4,), context=4, width=2, out=out))
    rows = json.loads(out.read_text())["rows"]
    assert [row["segment"] for row in rows] == [4, 2, 1] and all(
        row["temp_bytes"] > 0 for row in rows
    )


def test_a_checkout_is_as_fast_as_itself(tmp_path):
    out = tmp_path / "rows.json"
    small = {"batches": (1,), "pairs": 6, "seconds": 0.01, "rows": (0,)}
    checkouts.main(checkouts.Options((ROOT, ROOT), model=("tiny-causal",), out=out, **small))
    (row,) = json.loads(out.read_text())["rows"]
    low, high = row["interval"]
    assert 0.2 < low <= row["ratio"] <= high < 5 and min(row["tokens_per_second"]) > 0
