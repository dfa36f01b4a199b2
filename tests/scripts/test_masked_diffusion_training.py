"""The recipes of masked diffusion at toy size: all rounds in one go and in pieces, and what they refuse."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from experiment import script

from paradec_jax import load
from paradec_jax.families import parameter_shapes

TEXT = "To be, or not to be:\nthat is the question.\n" * 40


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def train():
    found = script("masked_diffusion/train")
    names = found["main"].__globals__
    small = {"length": 32, "rows": 2, "steps": 3, "warmup": 1, "cooldown": 0.4, "matmul_precision": "highest"}
    names["small"] = small
    return found


@pytest.fixture(scope="module")
def teacher(train, text, tmp_path_factory):
    """The folder of a trained toy denoiser."""
    folder = tmp_path_factory.mktemp("teacher")
    recipe = train["Recipe"](preset="test-mdlm", **train["main"].__globals__["small"])
    train["main"](recipe, text, folder, folder / "half")
    return folder


@pytest.fixture(scope="module")
def distill():
    found = script("masked_diffusion/distill")
    found["main"].__globals__["CHECKPOINT_EVERY"] = 2
    return found


@pytest.fixture(scope="module")
def recipe(distill):
    return distill["Recipe"](
        rounds=3, first_steps=8, updates=3, rows=2, warmup=1, ema_decay=0.9, matmul_precision="highest"
    )


@pytest.fixture(scope="module")
def whole(distill, recipe, text, teacher, tmp_path_factory):
    """The folder of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    distill["main"](recipe, text, str(teacher / "model"), folder)
    return folder


def test_a_denoiser_of_characters(teacher):
    model, half = load(teacher / "model"), load(teacher / "half")
    assert model.family == "masked_diffusion" and model.tokenizer.decode(model.tokenizer.encode(TEXT)) == TEXT
    assert (model.token_spec.mask, model.config.vocab_size) == (len(set(TEXT)), len(set(TEXT)) + 1)
    assert model.token_spec.alignment == "own" and model.config.max_length == 32
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {np.dtype("bfloat16")}
    found = json.loads((teacher / "held_out.json").read_text())
    assert found["kind"] == "bound" and 0 < found["nats"] < 2 * np.log(model.config.vocab_size)
    assert found["matmul_precision"] == "highest"


def test_a_rival_of_characters(train, text, tmp_path):
    small = train["main"].__globals__["small"]
    recipe = train["Recipe"](
        name="rival", preset="test-causal", width=24, heads=3, feed_forward=20, layers=1, **small
    )
    train["main"](recipe, text, tmp_path)
    model = load(tmp_path / "model")
    shape = model.config
    assert (shape.width, shape.heads, shape.kv_heads, shape.feed_forward, shape.layers) == (24, 3, 3, 20, 1)
    assert model.token_spec.bos == len(set(TEXT)) and model.token_spec.mask is None
    assert json.loads((tmp_path / "held_out.json").read_text())["kind"] == "likelihood"


def test_every_recipe_has_a_shape(train):
    for recipe in train["RECIPES"].values():
        assert train["shape_of"](recipe, 66).vocab_size == 66
    counts = [
        sum(
            math.prod(leaf.shape) for leaf in jax.tree.leaves(parameter_shapes(train["shape_of"](recipe, 66)))
        )
        for recipe in train["RECIPES"].values()
    ]
    assert counts[1] == pytest.approx(counts[0], rel=0.05) and counts[2] > max(counts[:2])
    with pytest.raises(SystemExit, match="preset must be a denoiser or a causal model"):
        train["shape_of"](train["Recipe"](preset="tiny-recurrent"), 66)
    with pytest.raises(SystemExit, match="four times a denoiser's width"):
        train["shape_of"](train["Recipe"](feed_forward=3), 66)


def test_all_rounds(whole, recipe, teacher, text):
    begun = load(teacher / "model")
    for which in range(recipe.rounds):
        student = load(whole / f"round-{which}" / "model")
        assert student.config == begun.config and student.token_spec == begun.token_spec
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), student.params, begun.params)
        assert max(jax.tree.leaves(moved)) > 0
        begun = student
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rounds = [line["eval/round"] for line in lines if "eval/round" in line]
    assert rounds == [0, 1, 2] and all("eval/nats" in line for line in lines if "eval/round" in line)
    assert json.loads((whole / "held_out.json").read_text())["kind"] == "bound"


def test_a_run_that_was_stopped_goes_on(distill, recipe, whole, text, teacher, tmp_path, monkeypatch):
    """By a kill at the edge of a round, by one before the model of a round is written, and by its limit of time."""
    names = distill["main"].__globals__
    start = str(teacher / "model")

    def run(minutes=75.0):
        distill["main"](recipe, text, start, tmp_path, minutes=minutes)

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(names["store"], "save", die)
        with pytest.raises(Killed):
            run()
    assert (tmp_path / "checkpoints" / "2").exists() and not (tmp_path / "round-0").exists()
    run(minutes=0.0)
    assert (tmp_path / "checkpoints" / "3").exists() and not (tmp_path / "checkpoints" / "4").exists()
    run()
    for which in range(recipe.rounds):
        models = [load(folder / f"round-{which}" / "model").params for folder in (whole, tmp_path)]
        jax.tree.map(np.testing.assert_array_equal, *models)
    before = (tmp_path / "metrics.jsonl").read_text()
    run()  # nothing is left to do
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_what_cannot_be_distilled_is_refused(distill, recipe, text, teacher, tmp_path):
    main, start = distill["main"], str(teacher / "model")
    with pytest.raises(SystemExit, match="needs a denoiser with a tokenizer"):
        main(recipe, text, "tiny-causal", tmp_path)
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "Zebra" * 30)
    with pytest.raises(SystemExit, match=r"has characters that .* does not know"):
        main(recipe, other, start, tmp_path / "run")
    many = tmp_path / "many.txt"
    many.write_text("<|endoftext|>".join([TEXT] * 3))
    with pytest.raises(SystemExit, match=r"many.txt holds 3 documents, but these recipes read one text"):
        main(recipe, many, start, tmp_path / "run")
    with pytest.raises(ValueError, match=r"first_steps at least jump\^rounds"):
        dataclasses.replace(recipe, rounds=4)
    with pytest.raises(ValueError, match="exported must be ema or raw"):
        dataclasses.replace(recipe, exported="both")
