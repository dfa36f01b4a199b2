"""The denoiser: initial values, prepared parameters, masks, dropout; recorded arrays have its
formula.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import positions_of
from stubs import tiny_denoiser, tiny_denoiser_params

from paradec_jax.config import MASKED_DIFFUSION_PRESETS
from paradec_jax.decode import Prefix
from paradec_jax.families import init_params
from paradec_jax.models import DenoiserNetwork
from paradec_jax.nn.modulated import dropout

BASE = MASKED_DIFFUSION_PRESETS["test-mdlm"]
NETWORK, PARAMS = tiny_denoiser(), tiny_denoiser_params()
MASK = BASE.vocab_size - 1
TOKENS = jnp.array([[3, 1, MASK, 1, 5, MASK, 2, 6], [2, 7, 1, MASK, MASK, 8, 1, 8]])
ATOL = 2e-5


@functools.partial(jax.jit, static_argnums=0)
def call(network, params, tokens, mask=None, key=None):
    out = network.forward(params, tokens, positions_of(tokens), None, mask, dropout=key)
    return network.logits(params, out.hidden), out.hidden


@functools.cache
def plain():
    return call(NETWORK, PARAMS, TOKENS)[0]


@pytest.mark.slow
def test_an_untrained_denoiser_knows_nothing():
    config = dataclasses.replace(BASE, width=64, vocab_size=256)
    params = init_params(config, jax.random.key(1))
    for leaf, inputs in (
        (params["embedding"], config.width),
        (params["noise_in"], 256),
        (params["layer_0"]["attention"]["k"], config.width),
        (params["layer_1"]["mlp"]["down"], config.feed_forward),
        (params["layer_1"]["mlp"]["down_bias"], config.feed_forward),
    ):
        bound = inputs**-0.5
        assert 0.9 * bound < float(jnp.max(jnp.abs(leaf))) <= bound
        assert float(jnp.std(leaf)) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert not params["head"].any() and not params["layer_1"]["modulation"].any()
    assert (params["layer_0"]["mlp_norm"] == 1).all()
    hidden = call(DenoiserNetwork(config), params, TOKENS)[1]  # the identity, normalised
    rows = params["embedding"][TOKENS]
    want = (rows - rows.mean(-1, keepdims=True)) / jnp.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(hidden, want, atol=ATOL)


def test_prepared_parameters_give_the_same_logits_and_the_same_head_input():
    prepared = NETWORK.prepare(PARAMS)
    assert NETWORK.prepare(prepared) is prepared
    logits, hidden = call(NETWORK, prepared, TOKENS)
    np.testing.assert_allclose(logits, plain(), atol=1e-4)
    np.testing.assert_allclose(hidden, call(NETWORK, PARAMS, TOKENS)[1], atol=ATOL)
    layers = {"layer_0", "layer_1"}
    assert prepared.params.keys() == {"embedding", "head", "head_bias", "final_constants"} | layers
    layer = prepared.params["layer_0"]
    assert layer.keys() == {"constants", "attention", "mlp"}
    assert prepared.params["head"] is PARAMS["head"]
    traced = jax.eval_shape(NETWORK.prepare, PARAMS)
    assert traced.params["layer_1"]["constants"].shape == (6, BASE.width)


def test_vectors_may_take_the_place_of_tokens():
    vectors = NETWORK.embedding(PARAMS)[TOKENS]
    np.testing.assert_allclose(call(NETWORK, PARAMS, vectors)[0], plain(), atol=1e-6)


def test_a_longer_buffer_changes_nothing():
    """Positions that a mask hides may hold anything."""
    longer = jnp.concatenate([TOKENS, jnp.array([[4, 4, 4], [9, 9, 9]])], axis=1)
    inside = jnp.arange(longer.shape[1]) < TOKENS.shape[1]
    mask = jnp.broadcast_to(inside, (longer.shape[1],) * 2)
    for given in (mask, jnp.stack([mask, mask])):
        got, _ = call(NETWORK, PARAMS, longer, given)
        np.testing.assert_allclose(got[:, : TOKENS.shape[1]], plain(), atol=1e-4)
    seen, _ = call(NETWORK, PARAMS, longer)
    assert (jnp.abs(seen[:, : TOKENS.shape[1]] - plain()).max(-1) > 1e-3).all()


def test_a_denoiser_keeps_no_cache():
    with pytest.raises(ValueError, match="prefix must be None"):
        NETWORK.forward(PARAMS, TOKENS, positions_of(TOKENS), Prefix(None, None))
    assert jax.eval_shape(NETWORK.forward, PARAMS, TOKENS, positions_of(TOKENS)).kv is None


def test_dropped_numbers_are_made_up_for():
    x = jnp.full((200, 100), 2.0)
    kept = dropout(x, jax.random.key(0), 0.25)
    assert set(np.unique(kept).tolist()) == {0.0, float(np.float32(2 / 0.75))}
    assert float(jnp.mean(kept == 0)) == pytest.approx(0.25, abs=0.01)


def test_dropout_has_a_key_of_its_own():
    key, other = jax.random.split(jax.random.key(3))
    dropped, _ = call(NETWORK, PARAMS, TOKENS, None, key)
    np.testing.assert_array_equal(dropped, call(NETWORK, PARAMS, TOKENS, None, key)[0])
    assert (dropped != plain()).any()
    assert (dropped != call(NETWORK, PARAMS, TOKENS, None, other)[0]).any()
    none = tiny_denoiser(dropout=0.0)
    np.testing.assert_allclose(call(none, PARAMS, TOKENS, None, key)[0], plain(), atol=1e-6)
