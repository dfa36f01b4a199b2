"""Thresholds learned through the decoder and block length as a dial, at toy size."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiment import read

from experiments.block_diffusion import block_length, learn_thresholds, train
from experiments.common.pool import batch_of, draw_pool
from experiments.decoders.elastic import ElasticDenoising
from paradec_jax import BlockDenoising, Model, load, store

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


@pytest.mark.slow
def test_lengths_are_compared(folder, tmp_path):
    path = tmp_path / "rows.json"
    block_length.main(
        block_length.Options(model=folder, thresholds=(0.5,), entropies=(0.5, 3.0), out=path, **SIZES)
    )
    table, lines = read(path)
    assert len(table["rows"]) == len(lines) == 5 and len(table["tuned"]) == 6
    assert table["rows"][0]["decoder"] == "length 4, one a step"


def test_one_setting_of_each_group_is_chosen():
    chosen = block_length.Options("toy", thresholds=(0.5, 0.9), entropies=(0.1,))
    named = block_length.settings(toy(), chosen)
    assert [setting.baseline for _, setting in named] == [True] + [False] * 7
    kinds = [type(setting.decoder) for _, setting in named]
    assert kinds.count(BlockDenoising) == 6 and kinds.count(ElasticDenoising) == 2
    row = {"exact": 5, "problems": 10}
    calls = [1.0, 0.9, 0.5, 0.6, 0.7, 0.4, 0.8, 0.3]
    rows = [row | {"network_calls_per_token": x} for x in calls]
    best = [setting.name for setting in block_length.chosen(named, rows, 0.1)]
    assert best == [
        "length 4, one a step",
        "length 8, one a step",
        "length 4, threshold 0.9",
        "length 8, threshold 0.5",
        "length to 0.1 nats, threshold 0.9",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: options("x", path, pool=1), "pool 1 must hold the 2 rows"),
        (lambda path: options("x", path, hand=()), "hand must be thresholds above 0"),
        (lambda path: options("x", path, hand=(1.5,)), "hand must be thresholds above 0 and at most 1"),
        (lambda path: block_length.Options("x", thresholds=()), "at least one number"),
        (
            lambda path: block_length.main(block_length.Options("tiny-causal", out=path)),
            "must be one of block diffusion whose training mixed lengths of blocks, not tiny-causal",
        ),
        (
            lambda path: learn_thresholds.main(learn_thresholds.Options("tiny-causal", out=path)),
            "model must be of family block_diffusion, not causal",
        ),
    ],
)
def test_bad_options_are_refused(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
