"""`paradec train blocks` on a tiny Llama of random weights: the mask, what it begins with, what
comes out.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ran, refused, words
from stubs.tiny import tiny_causal, tiny_causal_params

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.families import init_params, network_of
from paradec_jax.objectives.blocks import above


@pytest.mark.slow
def test_a_causal_model_learns_to_write_blocks(source, tmp_path, capsys):
    options = ("--no-look-back", "--alignment", "next", "--lora", 2)
    last = ran(source, tmp_path, *options, objective="blocks")
    model = pd.load(tmp_path / "model")
    assert (model.family, model.config.block, model.config.blocks) == ("block_diffusion", 4, (2, 4))
    assert model.token_spec.alignment == "next" and model.token_spec.mask == 2
    assert "the mask is token 2 (</s>)" in capsys.readouterr().out
    assert last["before"]["tokens a call"] == last["before"]["equal to one by one"] == 1
    assert last["after"].keys() == last["before"].keys() and last["after"]["tokens a call"] > 0
    merged = pd.load(source / "llama", adapter=tmp_path / "adapter").params
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-6
        )


@pytest.mark.slow
def test_a_model_of_blocks_goes_on(source, tmp_path, capsys):
    assert (
        main(words(source, tmp_path / "first", "--mask", "~", objective="blocks", updates=2)) == 0
    )
    folder = tmp_path / "first" / "model"
    model = pd.load(folder)
    assert (model.tokenizer.token_text(model.token_spec.mask), model.config.layers) == ("~", 3)
    again = ("--model", folder, "--no-look-back", "--blocks", 2, "--packed")
    again += ("--noise", "group", "--certainty", 0.1)
    assert main(words(source, tmp_path / "second", *again, objective="blocks", updates=2)) == 0
    last = pd.load(tmp_path / "second" / "model")
    assert last.token_spec == model.token_spec and (last.config.block, last.config.blocks) == (
        2,
        None,
    )
    assert main(words(source, tmp_path / "third", "--model", folder, objective="blocks")) == 1
    assert "--look-back and mask are options of a causal model" in capsys.readouterr().err


REFUSED = [
    (("--mask", "a"), "mask must be a token that neither"),
    (("--mask", 9999), "mask must be a token that neither"),
    (("--lora", 2), "--look-back adds a layer"),
    (("--blocks", 0), "--blocks must be at least 1, not 0"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, options, reason, tmp_path, capsys):
    assert (
        refused(source, tmp_path, *options, objective="blocks")
        and reason in capsys.readouterr().err
    )


def test_a_mask_that_the_chat_template_writes_is_refused(source, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}')
    options = ("--data", tmp_path / "data.jsonl", "--mask", "<s>")
    assert refused(source, tmp_path / "run", *options, objective="blocks")
    assert "nor its chat template nor the data use, not <s>" in capsys.readouterr().err


@pytest.mark.slow
def test_a_layer_below_adds_nothing():
    network, params = tiny_causal(), tiny_causal_params()
    deeper = dataclasses.replace(network.config, layers=network.config.layers + 1)
    tokens, positions = jnp.arange(6)[None], jnp.arange(6)[None]
    more = above(params, init_params(deeper, jax.random.key(1))["layer_0"])
    wanted = network.forward(params, tokens, positions).hidden
    np.testing.assert_array_equal(
        network_of(deeper).forward(more, tokens, positions).hidden, wanted
    )
