"""The recipes of block diffusion at toy size: whole and in pieces, from a causal model's weights; a step's memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.block_diffusion import grounds, train
from paradec_jax import Model, load, store
from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.data import Followers, build_tokenizer, token_spec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.families import init_params, network_of

SMALL = {
    "preset": "test-sdar",
    "layers": 1,
    "steps": 3,
    "warmup": 1,
    "cooldown": 0.4,
    "ema_decay": 0.9,
    "matmul_precision": "highest",
}
LAW = Followers(symbols=5, length=12)
CHAINS = train.Recipe(
    name="chains", ground="chains", init=None, blocks=(4,), prompt=4, law=LAW, batch_tokens=24, **SMALL
)
ONE_BUCKET = ((0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),)  # one program
WORDS = train.Recipe(name="words", init=None, blocks=(4, 8), batch_tokens=330, mixture=ONE_BUCKET, **SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run on a chain that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train.main(CHAINS, folder, folder / "half")
    return folder


def test_a_model_of_a_chain(whole):
    model, half = load(whole / "model"), load(whole / "half")
    assert (model.family, model.config.block, model.config.vocab_size) == ("block_diffusion", 4, 6)
    assert (model.token_spec.mask, model.token_spec.alignment) == (5, "own")
    assert model.tokenizer.decode([0, 4]) == "ae" and model.token_spec.stop == ()
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {np.dtype("bfloat16")}
    found = json.loads((whole / "held_out.json").read_text())
    assert found["floor"] == pytest.approx(np.log(2)) and found["floor"] < found["nats"] < 10
    assert found["block"] == 4 and 0 <= found["accuracy"] < 1
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    judged = lines[-2]  # the last line sums the seconds up
    assert "eval/nats" in judged and any("hidden" in line for line in lines)


def test_a_run_that_was_stopped_goes_on(whole, tmp_path):
    train.main(CHAINS, tmp_path, minutes=0.0)
    assert (tmp_path / "checkpoints" / "1").exists() and not (tmp_path / "model").exists()
    train.main(CHAINS, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "model").params, load(whole / "model").params)
    with pytest.raises(SystemExit, match="was begun with other seed"):
        train.main(dataclasses.replace(CHAINS, seed=1), tmp_path)


def test_no_training_draws_what_is_judged():
    ground = CHAINS.source()
    train_texts, held = ground.maker(0, 240, 4)(0)["tokens"], ground.held_out(240, 4)(0)["tokens"]
    assert train_texts.shape == held.shape == (20, 12) and (train_texts != held).any()
    words = WORDS.source()
    batch = words.held_out(336, 8)(0)
    assert batch["tokens"].shape == (2, 168) and batch["labelled"].any(axis=1).all()


def test_word_problems_in_blocks_of_several_lengths(tmp_path):
    train.main(WORDS, tmp_path)
    model = load(tmp_path / "model")
    assert (model.config.block, model.config.vocab_size) == (4, model.tokenizer.vocab_size)
    assert model.token_spec.mask == model.tokenizer.vocab_size - 1 and model.token_spec.stop == (2,)
    found = json.loads((tmp_path / "held_out.json").read_text())
    assert found["floor"] is None and found["nats"] > 0


# From a causal model's weights


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal model of the words, of the shape of the toy."""
    changes = {"qkv_bias": False, "qk_norm": True, "tie_embeddings": False, "vocab_size": 375}
    config = dataclasses.replace(CAUSAL_PRESETS["test-causal"], **changes)
    folder = tmp_path_factory.mktemp("causal") / "model"
    params = init_params(config, jax.random.key(3))
    store.save(folder, Model(config, params, token_spec(), build_tokenizer()))
    return folder


@pytest.mark.parametrize("look_back", [False, True])
def test_weights_of_a_causal_model_compute_what_they_did(causal, look_back):
    recipe = train.Recipe(preset="test-sdar", init=str(causal), look_back=look_back, alignment="next")
    model, start = train.untrained(recipe, recipe.source()), load(causal)
    assert model.config.layers == start.config.layers + look_back and model.config.block == 8
    assert model.token_spec.alignment == "next"
    tokens = np.asarray([[5, 9, 300, 12, 7]])
    positions, mask = np.arange(5)[None], np.tril(np.ones((5, 5), bool))

    def said(model):
        network = network_of(model.config)

        @jax.jit
        def logits(params):
            hidden = network.forward(
                params, jnp.asarray(tokens), jnp.asarray(positions), mask=jnp.asarray(mask)
            )
            return network.logits(params, hidden.hidden)

        return logits(dict(model.params))

    np.testing.assert_allclose(said(model), said(start), rtol=1e-5, atol=1e-5)
    if look_back:
        layer = model.params["layer_0"]
        assert not np.any(layer["attention"]["out"]) and not np.any(layer["mlp"]["down"])
        assert np.any(layer["attention"]["v"]) and np.any(layer["mlp"]["up"])


def test_what_cannot_be_started_from_is_refused(causal, whole, tmp_path):
    for init, changes, message in (
        (str(causal), {"layers": 1}, "has not the shape of tiny-sdar"),
        ("tiny-recurrent-distilled", {}, "has not the shape of tiny-sdar"),
    ):
        recipe = train.Recipe(preset="test-sdar", init=init, **changes)
        with pytest.raises(SystemExit, match=message):
            train.main(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    other = load(causal)
    foreign = dataclasses.replace(other, tokenizer=character_tokenizer("abcdefghij"), token_spec=TokenSpec())
    store.save(tmp_path / "foreign", foreign)
    with pytest.raises(SystemExit, match="has other tokens than words"):
        train.main(train.Recipe(preset="test-sdar", init=str(tmp_path / "foreign")), tmp_path / "run")
    # A chain may start from a chain.
    again = dataclasses.replace(CHAINS, init=str(whole / "model"), look_back=True)
    assert train.untrained(again, again.source()).config.layers == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "tiny-causal"}, "preset must be one of sdar-1.7b"),
        ({"cooldown": 2.0}, "cooldown must be a share"),
        ({"init": None, "look_back": True}, "name one with init"),
        ({"blocks": ()}, "at least one of them"),
    ],
)
def test_what_is_no_recipe_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        train.Recipe(**wrong)


def test_every_recipe_has_a_shape_and_batches():
    for name, recipe in train.RECIPES.items():
        ground = recipe.source()
        config = train.shape_of(recipe, ground)
        assert recipe.name == name and config.block == recipe.blocks[0]
        assert ground.spec(recipe.alignment).mask < config.vocab_size
        batch = ground.maker(0, recipe.batch_tokens, int(np.lcm.reduce(recipe.blocks)))(0)
        assert batch["labelled"].any() and batch["tokens"].max() < config.vocab_size
    with pytest.raises(ValueError, match="whole blocks of 24"):
        grounds.Chains().maker(0, 256, 24)
    with pytest.raises(ValueError, match="symbols must be at most 62"):
        grounds.Chains(Followers(symbols=63))
    with pytest.raises(ValueError, match="prompt must be from 1"):
        grounds.Chains(prompt=32)


# All runs, and what a step holds
