"""Masks beside a causal model: rows of text stay as they are, to the bit; rows of masks are what
merged adapters make of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from stubs import tiny_drafter
from test_transformer import ATOL, CAUSAL, KINDS, params_of

from paradec_jax.config import DraftConfig
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.families import parameter_shapes
from paradec_jax.models import DraftNetwork
from paradec_jax.nn import masks
from paradec_jax.store.lora import merge

COUNT = 3
# A token and its drafts, then masks after the first and after the last: those of a comb.
FED, V = np.asarray([[3, 1, 4], [2, 7, 1]]), 32
LENGTHS = 3, COUNT, COUNT
SEES = np.asarray([[0, 0, 0], [1, 0, 0], [3, 0, 0]])
AT = np.asarray([[4, 5, 6, 5, 6, 7, 7, 8, 9]] * 2)
IDS = jnp.asarray(np.concatenate([FED, np.tile(V + np.arange(COUNT), (2, 2))], axis=1))
TEXT = jnp.asarray([[5, 9, 2, 6], [8, 2, 8, 1]])  # cached


def beside(base, **changes) -> DraftNetwork:
    return DraftNetwork(DraftConfig(base=base, count=COUNT, rank=2, inner=8, **changes))


@functools.cache
def drafts_of(network: DraftNetwork, scale: float = 0.3):
    rng = np.random.default_rng(1)

    def draw(leaf):
        return jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, parameter_shapes(network.config))


@functools.cache
def caller(network: DraftNetwork):
    """Hidden states and keys and values of the comb after the cached texts."""

    @jax.jit
    def call(params):
        positions = jnp.broadcast_to(jnp.arange(TEXT.shape[1]), TEXT.shape)
        base = network.base
        cache = base.init_cache(jnp.zeros(2), 12)
        out = base.forward(params["network"], TEXT, positions, Prefix(cache, None))
        cache = base.write(cache, out.kv, jnp.zeros(2, jnp.int32))
        own = masks.windows(LENGTHS, jnp.asarray(SEES), causal=True)
        prefix = Prefix(cache, jnp.full(2, TEXT.shape[1]))
        return network.forward(params, IDS, jnp.asarray(AT), prefix, own)

    return call


def read(network: DraftNetwork, params):
    out = caller(network)(params)
    kv = [np.asarray(x, np.float32) for x in jax.tree.leaves(out.kv)]
    # The axis of positions is the one of nine entries.
    kv = [np.moveaxis(x, x.shape.index(AT.shape[1]), 1) for x in kv]
    return np.asarray(out.hidden, np.float32), kv


@over(CAUSAL, {*CAUSAL} - {"qwen2"}, argument="kind")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_text_are_what_they_are_without_adapters(kind, dtype):
    network = beside(dataclasses.replace(KINDS[kind], dtype=dtype))
    params = {"network": params_of(network.config.base), "drafter": drafts_of(network)}
    none = dict(params, drafter=drafts_of(network, 0.0))
    (hidden, kv), (plain, plain_kv) = read(network, params), read(network, none)
    count = FED.shape[1]
    np.testing.assert_array_equal(hidden[:, :count], plain[:, :count])
    assert np.abs(hidden[:, count:] - plain[:, count:]).max(axis=(0, 2)).min() > 1e-2
    for found, wanted in zip(kv, plain_kv, strict=True):
        np.testing.assert_array_equal(found[:, :count], wanted[:, :count])


@over(CAUSAL, {*CAUSAL} - {"windows"}, argument="kind")
def test_prepared_parameters_and_a_loop_over_layers_change_nothing(kind):
    base = dataclasses.replace(KINDS[kind], layers=3)
    base = dataclasses.replace(base, sliding_layers=(True, False)) if base.sliding_window else base
    network = beside(base)
    params = {"network": params_of(base), "drafter": drafts_of(network)}
    wanted, _ = read(network, params)
    prepared = {"network": network.base.prepare(params["network"])}
    prepared["drafter"] = network.prepare(params["drafter"])
    assert network.prepare(prepared["drafter"]) is prepared["drafter"]
    np.testing.assert_allclose(read(network, prepared)[0], wanted, atol=ATOL)
    looped = beside(dataclasses.replace(base, scan_layers=True))
    np.testing.assert_allclose(read(looped, params)[0], wanted, atol=ATOL)


@over(CAUSAL, {*CAUSAL} - {"qwen3"}, argument="kind")
def test_a_mask_is_read_with_merged_adapters(kind):
    """A window of masks alone is one of the model whose matrices hold the adapters."""
    network = beside(KINDS[kind])
    params = {"network": params_of(KINDS[kind]), "drafter": drafts_of(network)}
    ids = jnp.tile(V + jnp.arange(COUNT), (2, 1))
    positions = jnp.broadcast_to(jnp.arange(COUNT), ids.shape)
    found = network.forward(params, ids, positions).hidden
    adapter = {name: of for name, of in params["drafter"].items() if name.startswith("layer_")}
    merged = merge(params["network"], adapter, 1.0)
    vectors = jnp.broadcast_to(params["drafter"]["masks"], (2, COUNT, network.config.base.width))
    wanted = network.base.forward(merged, vectors, positions).hidden
    np.testing.assert_allclose(found, wanted, atol=ATOL)
    plain = network.base.forward(params["network"], vectors, positions).hidden
    assert np.abs(found - plain).max() > 0.1


@over([("qwen2", "float32"), ("llama", "bfloat16"), ("qwen2", "bfloat16")], argument="kind, dtype")
def test_scores_are_columns_of_the_logits(kind, dtype):
    """Of a tied and of an untied output matrix, prepared too."""
    base = dataclasses.replace(KINDS[kind], dtype=dtype)
    network, params = beside(base), {"network": params_of(base)}
    hidden = jax.random.normal(jax.random.key(0), (2, base.width), dtype)
    ids = jnp.asarray([[0, 5, 31], [7, 7, 1]])
    for given in (params["network"], network.base.prepare(params["network"])):
        wanted = np.take_along_axis(np.asarray(network.base.logits(given, hidden)), ids, axis=1)
        found = network.scores({"network": given}, hidden, ids)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_sampler_head_is_the_formula():
    """z = h + silu([h; norm(E[x])] W1) W2; with zeros in W2 it says nothing."""
    network = beside(KINDS["qwen2"])
    given, base = drafts_of(network), params_of(KINDS["qwen2"])
    hidden = np.random.default_rng(2).normal(size=(2, network.config.base.width))
    before = jnp.asarray([4, 30])
    params = {"network": base, "drafter": given}
    given_hidden = jnp.asarray(hidden, jnp.float32)
    found = network.informed(params, given_hidden, before)
    x = np.asarray(base["embedding"], np.float64)[before]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + network.config.base.norm_eps)
    inner = np.concatenate([hidden, x * given["embedding_norm"]], -1) @ given["sampler_in"]
    wanted = hidden + inner / (1 + np.exp(-inner)) @ given["sampler_out"]
    np.testing.assert_allclose(found, wanted, atol=ATOL)
    mute = dict(given, sampler_out=jnp.zeros_like(given["sampler_out"]))
    params["drafter"] = mute
    np.testing.assert_allclose(network.informed(params, given_hidden, before), hidden, atol=1e-6)


@pytest.mark.slow
def test_adapters_begin_by_changing_nothing():
    """Masks begin as the vector that is given, and are read as it would be."""
    network = tiny_drafter()
    vector = jnp.linspace(-1, 1, network.config.base.width)
    params = DraftNetwork.init_params(network.config, jax.random.key(0), vector)
    base = params_of(network.config.base)
    ids = jnp.full((1, 2), network.vocab_size)
    positions = jnp.arange(2)[None]
    both = {"network": base, "drafter": params}
    found = network.forward(both, ids, positions).hidden
    wanted = network.base.forward(base, jnp.tile(vector, (1, 2, 1)), positions).hidden
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(network.informed(both, found, ids - 32), found)
