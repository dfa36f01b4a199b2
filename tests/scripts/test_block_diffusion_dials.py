"""Thresholds learned through the decoder and block length as a dial, at toy size."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.block_diffusion import learn_thresholds, train
from experiments.common.pool import batch_of, draw_pool
from paradec_jax import Model, load, store

RECIPE = train.Recipe(name="toy", preset="test-sdar", init=None, blocks=(4, 8))
SIZES = {"tuning": 3, "problems": 4, "problem_steps": (2, 2)}


@functools.cache
def toy() -> Model:
    """Random weights of a model that serves blocks of 4 and 8."""
    model = train.untrained(RECIPE, RECIPE.source())
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_length=256))


@pytest.fixture
def folder(tmp_path):
    store.save(tmp_path / "model", toy())
    return str(tmp_path / "model")


def test_a_checkpoint_tells_the_lengths_it_serves(folder):
    assert load(folder).network.blocks == (4, 8)
    assert "[4, 8]" in json.dumps(json.loads((Path(folder) / "config.json").read_text()))
    one = train.shape_of(dataclasses.replace(RECIPE, blocks=(8,)), RECIPE.source())
    assert one.blocks is None and one.block == 8


def options(model, tmp_path, **changes):
    sizes = {"updates": 2, "rows": 2, "pool": 3, "calls": 5, "trial_rows": 2, "candidates": 2, "hand": (0.5,)}
    return learn_thresholds.Options(
        model=model, thresholds=2, out=tmp_path / "rows.json", **{**SIZES, **sizes, **changes}
    )


def test_thresholds_are_learned_searched_and_measured(folder, tmp_path, capsys):
    learn_thresholds.main(options(folder, tmp_path))
    table = json.loads((tmp_path / "rows.json").read_text())
    names = ["hand-set (SDAR)", *learn_thresholds.METHODS]
    assert [row["decoder"] for row in table["rows"]] == names
    learned = table["learner"]
    assert len(learned["history"]) == 2 and len(learned["candidates"]) == 2
    assert all(np.isfinite(entry["loss"]) and any(entry["gradient"]) for entry in learned["history"])
    assert learned["candidates"][-1] != [0.9, 0.9] and len(learned["candidates"][-1]) == 2
    assert table["random_search"]["cost"] >= learned["cost"] > 0
    assert set(table["learned_less"]) == set(learn_thresholds.METHODS[1:])
    assert "learned less random search" in capsys.readouterr().out


def test_a_threshold_that_says_too_much_too_early_costs_nats(folder, tmp_path):
    """Lower thresholds: fewer calls; the loss trades these for nats, and its gradient tells so."""
    chosen = options(folder, tmp_path, calls=12)
    model = load(folder)
    pool = draw_pool(model, chosen.pool, chosen.seed, chosen.problem_steps)
    loss = jax.jit(jax.value_and_grad(learn_thresholds.make_loss(model, pool, chosen), has_aux=True))
    batch = batch_of(model, pool, chosen.seed, np.arange(2))
    (_, high), gradient = loss(jnp.full(2, 3.0), model.params, batch)
    (_, low), _ = loss(jnp.full(2, -4.0), model.params, batch)
    assert float(low["calls_per_token"]) < float(high["calls_per_token"]) <= 1.001
    assert float(high["tokens"]) > 0 and np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: options("x", path, pool=1), "pool 1 must hold the 2 rows"),
        (lambda path: options("x", path, hand=()), "hand must be thresholds above 0"),
        (lambda path: options("x", path, hand=(1.5,)), "hand must be thresholds above 0 and at most 1"),
        (
            lambda path: learn_thresholds.main(learn_thresholds.Options("tiny-causal", out=path)),
            "model must be of family block_diffusion, not causal",
        ),
    ],
)
def test_bad_options_are_refused(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
