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


@pytest.mark.slow
def test_the_plain_program_reads_a_canvas_as_the_library_does(short, monkeypatch):
    monkeypatch.setattr(calls, "CONTEXT", 8)
    config = PRESETS["test-full"]
    network, plain = calls.network_at(config), few_rows.Plain(config)
    drawn = jax.tree.map(lambda leaf: leaf + 0.01, init_params(config, jax.random.key(0)))
    params, canvas = network.prepare(drawn), jnp.arange(8)[None] + 1
    loop = few_rows.library_loop(config, params, 3)
    out = network.forward(params, canvas, jnp.arange(8)[None])
    # The whole canvas fills the cache; a block is read over what is outside it.
    empty = few_rows.plain_loop(config, loop).buffers[0]
    scores, kept = plain.scores(params.params, empty, canvas[0], 0, jnp.zeros(0))
    np.testing.assert_allclose(scores, network.logits(params, out.hidden)[0], atol=1e-5)
    cache = network.write(loop.buffers[0], out.kv, jnp.zeros(1, jnp.int32))
    block = jnp.array([[9, 2, 6]])
    scores, _ = plain.scores(params.params, kept, block[0], loop.at[0], jnp.zeros(0))
    _, new = few_rows.read_blocks(network, params, cache, block, loop.at, 1)
    np.testing.assert_array_equal(new[0], jnp.argmax(scores, -1))
