"""The scripts about chains of pointers: training at toy size, and what the bundled model must show."""

import dataclasses
import json

import pytest
from experiment import script

from paradec_jax import load
from paradec_jax.data.pointers import Stage


@pytest.mark.slow
def test_training_writes_a_model_that_loads(tmp_path):
    found = script("recurrent_depth/pointers")
    recipe = dataclasses.replace(
        found["RECIPES"]["tiny-pointers"],
        width=16,
        heads=2,
        curriculum=(Stage(0, 4, 1, queries=2, rows=2), Stage(1, 8, 2, queries=3, rows=1)),
        updates=2,
        warmup=1,
        cooldown=1,
    )
    found["main"](recipe, tmp_path)
    log = [json.loads(line) for line in (tmp_path / "training" / "metrics.jsonl").open()]
    assert log[-2]["step"] == 2 and log[-2]["loss"] > 0 and log[-1]["wall_s"] > 0
    model = load(str(tmp_path / "model"))
    assert model.config == recipe.shape
