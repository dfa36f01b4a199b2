"""The denoiser: initial values, the formula in NumPy, prepared parameters, masks, dropout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import tiny_denoiser, tiny_denoiser_params
from test_transformer import rotated

from paradec_jax.config import MASKED_DIFFUSION_PRESETS
from paradec_jax.decode import Prefix
from paradec_jax.families import init_params
from paradec_jax.models import DenoiserNetwork
from paradec_jax.models.denoiser import Denoiser
from paradec_jax.nn.modulated import dropout

BASE = MASKED_DIFFUSION_PRESETS["test-mdlm"]
NETWORK, PARAMS = tiny_denoiser(), tiny_denoiser_params()
MASK = BASE.vocab_size - 1
TOKENS = jnp.array([[3, 1, MASK, 1, 5, MASK, 2, 6], [2, 7, 1, MASK, MASK, 8, 1, 8]])
ATOL = 2e-5


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2])


@functools.partial(jax.jit, static_argnums=0)
def call(network, params, tokens, mask=None, key=None):
    out = network.forward(params, tokens, positions_of(tokens), None, mask, dropout=key)
    return network.logits(params, out.hidden), out.hidden


@functools.cache
def plain():
    return call(NETWORK, PARAMS, TOKENS)[0]


# Initial values, and what a call costs


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


def test_work_of_a_call():
    """Weights read and multiplied by one call, by hand."""
    c = BASE
    weights = c.layers * 12 * c.width**2 + c.vocab_size * c.width
    work = NETWORK.work(3, 8, 0)
    assert work.bytes == 4 * weights
    assert work.flops == 24 * (2 * weights + 4 * c.layers * c.width * 8)
    with pytest.raises(ValueError, match="no context of 5 positions"):
        NETWORK.work(1, 1, 5)


# The formula


def silu(x):
    return x / (1 + np.exp(-x))


def norm_of(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def reference(params, tokens) -> np.ndarray:
    """Logits [T, V] of one sequence in float64, position by position and head by head, at noise level zero."""
    c, p = BASE, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    features = np.concatenate([np.ones(128), np.zeros(128)])
    vector = silu(features @ p["noise_in"] + p["noise_in_bias"]) @ p["noise_out"] + p["noise_out_bias"]
    vector = silu(vector)
    x = p["embedding"][tokens]
    for i in range(c.layers):
        layer, a, m = p[f"layer_{i}"], p[f"layer_{i}"]["attention"], p[f"layer_{i}"]["mlp"]
        six = np.einsum("k,kmd->md", vector, layer["modulation"]) + layer["modulation_bias"]
        h = norm_of(x) * layer["attention_norm"] * (1 + six[1]) + six[0]
        q, k, v = (np.einsum("td,dhc->thc", h, a[n]) for n in "qkv")
        mixed = np.zeros_like(q)
        for t in range(len(tokens)):
            for head in range(c.heads):
                keys = np.stack([rotated(k[s, head], s, 1e4) for s in range(len(tokens))])
                weights = np.exp(keys @ rotated(q[t, head], t, 1e4) / math.sqrt(c.head_dim))
                mixed[t, head] = weights / weights.sum() @ v[:, head]
        x = x + six[2] * np.einsum("thc,hcd->td", mixed, a["out"])
        h = norm_of(x) * layer["mlp_norm"] * (1 + six[4]) + six[3]
        u = h @ m["up"] + m["up_bias"]
        u = u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + six[5] * (u @ m["down"] + m["down_bias"])
    two = np.einsum("k,kmd->md", vector, p["final_modulation"]) + p["final_modulation_bias"]
    return (norm_of(x) * p["final_norm"] * (1 + two[1]) + two[0]) @ p["head"] + p["head_bias"]


def test_forward_is_the_formula():
    for row, tokens in zip(plain(), TOKENS, strict=True):
        np.testing.assert_allclose(row, reference(PARAMS, tokens), atol=2e-4)


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


def test_bfloat16():
    low = tiny_denoiser(dtype="bfloat16", param_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    logits, hidden = call(low, params, TOKENS)
    assert logits.dtype == jnp.float32 and hidden.dtype == jnp.bfloat16
    assert (logits != logits.astype(jnp.bfloat16)).any(), "logits are summed and kept in float32"
    assert float(jnp.max(jnp.abs(logits - plain()))) < 0.1 * float(jnp.max(jnp.abs(plain())))
    prepared, _ = call(low, low.prepare(params), TOKENS)
    assert float(jnp.max(jnp.abs(prepared - logits))) < 0.1 * float(jnp.max(jnp.abs(plain())))


# Training


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


def test_the_module_runs_alone():
    logits = Denoiser(BASE).apply({"params": PARAMS}, TOKENS)
    np.testing.assert_allclose(logits, plain(), atol=1e-5)
