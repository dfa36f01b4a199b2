"""The plain program that the library's calls are timed beside gives the same scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems import calls, few_rows
from paradec_jax.decode import Prefix
from paradec_jax.families import PRESETS, init_params


@pytest.fixture
def short(monkeypatch):
    for name, value in {"CONTEXT": 5, "LONG": 1e-6, "_PROGRAMS": {}}.items():
        monkeypatch.setattr(calls, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test-causal", "test-recurrent"])
def test_the_plain_program_gives_the_librarys_scores(name, short):
    config = dataclasses.replace(
        PRESETS[name], **({"qk_norm": True} if name == "test-causal" else {})
    )
    network = calls.network_at(config)
    drawn = jax.tree.map(lambda leaf: leaf + 0.01, init_params(config, jax.random.key(0)))
    params, at, tokens = network.prepare(drawn), jnp.full(1, 5), jnp.array([[3, 1, 4]])
    cache = network.init_cache(jax.random.split(jax.random.key(1), 1), 8)
    before = jnp.array([[9, 2, 6, 5, 3]])
    out = network.forward(params, before, jnp.arange(5)[None], Prefix(cache, None))
    cache = network.write(cache, out.kv, jnp.zeros(1, jnp.int32))
    want = network.forward(params, tokens, 5 + jnp.arange(3)[None], Prefix(cache, at))
    want = network.logits(params, want.hidden)[0]

    plain, loop = few_rows.Plain(config), calls.call_loop(config, params, 3, 5)
    empty = few_rows.plain_loop(config, loop).buffers[0]
    latents = cache.initial[0] if plain.recurrent else jnp.zeros((8, 0))
    _, kept = plain.scores(params.params, empty, before[0], 0, latents[:5])
    got, _ = plain.scores(params.params, kept, tokens[0], 5, latents[5:])
    np.testing.assert_allclose(got, want, atol=1e-5)
