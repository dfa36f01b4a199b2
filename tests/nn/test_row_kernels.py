"""Kernels for few rows against plain JAX, run as plain JAX themselves; who is served by them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stubs
from jax.experimental import pallas as pl
from marks import over

from paradec_jax.config.presets import MASKED_DIFFUSION_PRESETS
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.nn import backend, blocks, ends
from paradec_jax.nn.modulated import PlainMLP

WIDTH = 5  # of a window: no power of two
SIZE = 70  # of a cache: more than one part of it
SHAPE = {"width": 64, "heads": 6, "kv_heads": 2, "head_channels": 32, "feed_forward": 128}
SHAPE |= {"layers": 1}
TREE = np.tri(WIDTH, dtype=bool) & ~np.eye(WIDTH, k=-1, dtype=bool)


@pytest.fixture
def kernels(monkeypatch):
    """Networks made of kernels, on this device."""
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", interpreted)

    def use():
        for module in (blocks, ends):
            monkeypatch.setattr(module, "kernels", lambda attention, rows, *arrays: True)
            monkeypatch.setattr(module, "on_cuda", lambda kernel, plain, *arrays: kernel(*arrays))

    return use


def visible(kind: str):
    """What two rows see of a cache: a length each, or what each query sees."""
    lengths = jnp.asarray([SIZE - 4, 7])
    each = np.random.default_rng(0).random((2, WIDTH, SIZE)) < 0.5
    return {"nothing": None, "a length": lengths, "a query": jnp.asarray(each)}[kind]


CASES = {
    "norms": ("float32", "a query", TREE, {"qk_norm": True}),
    "biases": ("bfloat16", "a length", None, {"qkv_bias": True}),
    "no cache": ("bfloat16", "nothing", TREE, {"kv_heads": 6}),
}


@over(CASES, {"no cache"})
def test_a_network_of_kernels(name, kernels):
    """Hidden states, keys and values of a window are those of the plain network, grouped heads and
    a tree's mask included.
    """
    dtype, kind, mask, changes = CASES[name]
    changes = SHAPE | {"qk_norm": False, "qkv_bias": False} | changes
    network = stubs.tiny_causal(**changes, dtype=dtype, param_dtype=dtype)
    params = network.init_params(network.config, jax.random.key(0))
    drawn = functools.partial(jax.random.normal, jax.random.key(1))
    cache = network.init_cache(jax.random.split(jax.random.key(2), 2), SIZE)
    cache = jax.tree.map(lambda x: drawn(x.shape, x.dtype).astype(dtype), cache)
    tokens = jax.random.randint(jax.random.key(3), (2, WIDTH), 0, network.vocab_size)
    positions = jnp.asarray([[SIZE - 4], [7]]) + jnp.arange(WIDTH)
    seen = None if mask is None else jnp.asarray(mask)

    def call(params, cache):
        return network.forward(params, tokens, positions, Prefix(cache, visible(kind)), seen)

    want = jax.jit(call)(params, cache)
    kernels()
    got = jax.jit(lambda *given: call(*given))(params, cache)
    close = {"atol": 2e-5} if dtype == "float32" else {"atol": 0.12}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), **close)


def test_a_plain_mlp_of_kernels(kernels):
    """Of a denoiser's block, with biases."""
    config = dataclasses.replace(MASKED_DIFFUSION_PRESETS["test-mdlm"], width=64)
    mlp, x = PlainMLP(config), jax.random.normal(jax.random.key(1), (2, WIDTH, 64))
    params = mlp.init(jax.random.key(0), x)
    want = mlp.apply(params, x)
    kernels()
    np.testing.assert_allclose(mlp.apply(params, x), want, atol=2e-5)


@over(["tied", "head", "denoiser"], argument="output")
def test_the_most_probable_token(output, kernels):
    """The first of the largest logits, of a vocabulary that no tile divides."""
    network: Any = stubs.tiny_denoiser(width=64, vocab_size=201)
    if output != "denoiser":
        network = stubs.tiny_causal(**SHAPE, vocab_size=201, tie_embeddings=output == "tied")
    params = network.init_params(network.config, jax.random.key(0))
    tokens, rows = (jax.random.normal(jax.random.key(i), (n, 64)) for i, n in ((1, 201), (2, 9)))
    tokens = tokens.at[150].set(tokens[70])  # in another tile
    rows = jnp.concatenate([tokens[70][None], rows])[None]
    params |= {"embedding": tokens} if output == "tied" else {"head": tokens.T}
    want = jnp.argmax(network.logits(params, rows), axis=-1)
    assert want[0, 0] == 70
    kernels()
    assert np.array_equal(network.most_probable(params, rows), want)


def test_who_is_served(monkeypatch):
    """Few rows in bfloat16, where the default backend is no CPU and attention is not dense."""
    rows = jnp.zeros((2, 3), jnp.bfloat16)
    assert not backend.kernels("blocked", 6, rows)
    monkeypatch.setenv(backend.SWITCH, "plain")
    assert backend.kernels("blocked", 6, rows)
    assert not backend.kernels("dense", 6, rows)
    assert not backend.kernels("blocked", backend.FEW + 1, rows)
    assert not backend.kernels("blocked", 6, rows, rows.astype(jnp.float32))
    for capability, serves in (("7.5", False), ("9.0", True)):
        device = type("Device", (), {"compute_capability": capability})()
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert backend.kernels("blocked", 6, rows) is serves
    monkeypatch.setenv(backend.ATTENTION, "plain")
    assert not backend.kernels("blocked", 6, rows)
