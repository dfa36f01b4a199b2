"""Prepared parameters change no output; the layout switch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from stubs.tiny import drawn

from paradec_jax.decode.machine.network import Prefix, Prepared
from paradec_jax.families import PRESETS, init_params, network_of
from paradec_jax.nn import backend
from paradec_jax.nn.products import dense

CONFIGS = {
    "causal": dataclasses.replace(PRESETS["test-causal"], qk_norm=True),
    "recurrent": PRESETS["test-recurrent"],
    "sdar": PRESETS["test-sdar"],
    "untied": dataclasses.replace(PRESETS["test-recurrent"], tie_embeddings=False, qk_bias=False),
}
SOME = [pytest.param(name, marks=pytest.mark.slow if name != "causal" else ()) for name in CONFIGS]
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@functools.cache
def params_of(name: str):
    return jax.tree.map(lambda leaf: leaf + 0.01, drawn(init_params, CONFIGS[name], 0))


def logits(name: str, params):
    """A forward pass, traced anew."""
    network = network_of(CONFIGS[name])
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    keys = jax.random.split(jax.random.key(1), len(TOKENS))

    def call(p):
        prefix = Prefix(network.init_cache(keys, TOKENS.shape[1]), None)
        return network.logits(p, network.forward(p, TOKENS, positions, prefix).hidden)

    return jax.jit(call)(params)


@over(SOME)
def test_a_tied_head_is_laid_out_and_nothing_else_changes(name):
    config, params = CONFIGS[name], params_of(name)
    prepared = network_of(config).prepare(params).params
    head = prepared.pop("head") if config.tie_embeddings else params["embedding"].T
    np.testing.assert_array_equal(head, params["embedding"].T)
    assert prepared.keys() == params.keys()
    assert all(prepared[key] is leaf for key, leaf in params.items())
    np.testing.assert_allclose(
        logits(name, network_of(config).prepare(params)), logits(name, params), atol=1e-5
    )


@over([("bfloat16", "float32"), ("float32", "bfloat16")], argument="types")
@over(SOME)
def test_matrices_are_cast_once_and_no_number_changes(name, types):
    """A prepared step casts no matrix: each is there in the dtype of its products, as a raw step
    makes it.
    """
    dtype, stored = types
    config = dataclasses.replace(CONFIGS[name], dtype=dtype, param_dtype=stored)
    network, params = network_of(config), jax.tree.map(lambda x: x.astype(stored), params_of(name))
    tokens, positions = TOKENS[:, :3], jnp.broadcast_to(jnp.arange(3), (2, 3))
    cache = network.init_cache(jax.random.split(jax.random.key(1), 2), 3)

    def call(p):
        return network.logits(p, network.forward(p, tokens, positions, Prefix(cache, None)).hidden)

    def casts(p) -> list[str]:
        text = jax.jit(call).lower(p).as_text()
        found = re.findall(r"stablehlo.convert .*tensor<(\d+)x\d+x\w+>\) -> ", text)
        # more than the positions of the call
        return [rows for rows in found if int(rows) >= config.width]

    prepared = network.prepare(params)
    np.testing.assert_allclose(jax.jit(call)(prepared), jax.jit(call)(params), atol=1e-5)
    assert casts(params) and not casts(prepared)


def test_raw_parameters_are_never_taken_for_prepared_ones():
    """A tied model's own head, which no raw tree has, is not looked for."""
    params = params_of("recurrent")
    astray = {
        **params,
        "head": jnp.zeros((params["embedding"].shape[1], params["embedding"].shape[0])),
    }
    np.testing.assert_array_equal(logits("recurrent", astray), logits("recurrent", params))
    assert not np.asarray(logits("recurrent", Prepared(astray))).any()


@over(SOME)
def test_plain_layouts_change_no_number(name, monkeypatch):
    want = logits(name, params_of(name))
    monkeypatch.setenv(backend.SWITCH, "plain")
    prepared = network_of(CONFIGS[name]).prepare(params_of(name)).params
    assert ("head" in prepared) == (not CONFIGS[name].tie_embeddings)
    np.testing.assert_allclose(logits(name, Prepared(prepared)), want, atol=1e-5)
    x, weight = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    assert "reshape" not in str(jax.make_jaxpr(lambda *xs: dense(*xs))(x, weight))
    monkeypatch.setenv(backend.SWITCH, "cpu")
    assert "reshape" in str(jax.make_jaxpr(lambda *xs: dense(*xs))(x, weight))
    monkeypatch.setenv(backend.SWITCH, "gpu")
    with pytest.raises(ValueError, match="PARADEC_LAYOUTS must be 'cpu' or 'plain', not 'gpu'"):
        backend.cpu_layouts()
