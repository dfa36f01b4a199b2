"""The transformer: cache, candidates, and what a network of blocks is.

Recorded logits of every layout (`tests/convert/test_forms.py`, `tests/replays`) have its formula.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from reading import positions_of, read

from paradec_jax import decode
from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, CAUSAL_PRESETS, TokenSpec, TransformerConfig
from paradec_jax.decode.machine.network import CachedNetwork, Prefix
from paradec_jax.families import network_of, parameter_shapes
from paradec_jax.models import TransformerNetwork
from paradec_jax.nn import masks

BASE = CAUSAL_PRESETS["test-causal"]
BLOCKS = BLOCK_DIFFUSION_PRESETS["test-sdar"]
KINDS = {
    "qwen2": BASE,
    "qwen3": dataclasses.replace(BASE, qkv_bias=False, qk_norm=True, head_channels=6),
    "llama": dataclasses.replace(BASE, qkv_bias=False, kv_heads=4, tie_embeddings=False),
    "sdar": dataclasses.replace(BLOCKS, block=3, head_channels=6),
    "llama biases": dataclasses.replace(BASE, out_bias=True, mlp_bias=True),
    "windows": dataclasses.replace(BASE, layers=3, sliding_window=3, sliding_layers=(True, False)),
}
CAUSAL = [kind for kind, config in KINDS.items() if config.family == "causal"]
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
ATOL = 2e-5


@functools.cache
def params_of(config: TransformerConfig):
    """Parameters none of which is zero or one, so that each of them matters."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.4 + (leaf.ndim == 1), leaf.dtype)

    return jax.tree.map(draw, parameter_shapes(config))


def empty_cache(network, batch, size):
    return network.init_cache(jax.random.split(jax.random.key(0), batch), size)


@functools.cache
def uncached(kind: str):
    return read(TransformerNetwork(KINDS[kind]), params_of(KINDS[kind]), TOKENS)


def test_vectors_may_take_the_place_of_tokens():
    network, params = TransformerNetwork(BASE), params_of(BASE)
    vectors = network.embedding(params)[TOKENS]
    logits, *_ = read(network, params, vectors)
    np.testing.assert_allclose(logits, uncached("qwen2")[0], atol=ATOL)


# Cache


@over(
    [*((kind, (2, 4), 4) for kind in CAUSAL), ("sdar", (0, 3), 3), ("sdar", (2, 5), 1)],
    argument="kind, start, width",
)
def test_cached_equals_uncached(kind, start, width):
    """Rows stand at different lengths, windows of blocks end where a block does; what lies beyond
    is scratch.
    """
    network, params = TransformerNetwork(KINDS[kind]), params_of(KINDS[kind])
    want, _, kv = uncached(kind)
    cache = network.write(empty_cache(network, 2, 12), kv, jnp.zeros(2, jnp.int32))
    visible = jnp.array(start)
    window = jnp.stack([row[at : at + width] for row, at in zip(TOKENS, start, strict=True)])
    logits, _, own = read(
        network, params, window, positions_of(window, visible), Prefix(cache, visible)
    )
    for row, at in enumerate(start):
        np.testing.assert_allclose(logits[row], want[row, at : at + width], atol=ATOL)
    for new, old in zip(network.write(cache, own, visible), cache, strict=True):
        np.testing.assert_allclose(new.k, old.k, atol=ATOL)
        np.testing.assert_allclose(new.v, old.v, atol=ATOL)


def test_candidates_side_by_side_in_one_window():
    """Two continuations share prefix and positions; each sees itself alone, and the winner is
    stored.
    """
    network, params = TransformerNetwork(BASE), params_of(BASE)
    length, width = 3, 2
    first, second = TOKENS[:, 3:5], TOKENS[:, 5:7]
    *_, kv = read(network, params, TOKENS[:, :length])
    cache = network.write(empty_cache(network, 2, 8), kv, jnp.zeros(2, jnp.int32))
    prefix = Prefix(cache, jnp.full(2, length))
    window = jnp.concatenate([first, second], axis=1)
    positions = jnp.tile(length + jnp.arange(width), (2, 2))
    blocks = jnp.asarray(np.kron(np.eye(2), masks.causal(width)) > 0)
    for mask in (blocks, jnp.stack([blocks, blocks])):
        logits, _, own = read(network, params, window, positions, prefix, mask)
        for i, candidate in enumerate((first, second)):
            alone, _, want = read(network, params, candidate, positions[:, :width], prefix)
            np.testing.assert_allclose(logits[:, i * width : (i + 1) * width], alone, atol=ATOL)
            picked = network.pick(own, jnp.full(2, i * width), width)
            for new, old in zip(picked, want, strict=True):
                np.testing.assert_allclose(new.k, old.k, atol=ATOL)
                np.testing.assert_allclose(new.v, old.v, atol=ATOL)


# Blocks


def test_facts_of_the_network():
    network = network_of(BLOCKS)
    assert isinstance(network, CachedNetwork)
    assert (network.visibility, network.block, network.counters) == ("block", 4, ())
    assert network != network_of(dataclasses.replace(BLOCKS, block=8))
    fields = {
        name: value
        for name, value in BLOCKS.to_dict().items()
        if name not in ("block", "blocks", "origin")
    }
    causal = network_of(dataclasses.replace(BASE, **fields))
    assert (causal.visibility, causal.block) == ("causal", None) and network != causal
    assert network.work(2, 4, 16) == causal.work(2, 4, 16)
    assert (network.max_length, causal.max_length) == (128, 128)


def test_only_whole_blocks_count_as_room():
    """A text's last block is read whole, so a prompt and its new tokens must leave room for it."""
    odd = dataclasses.replace(BLOCKS, max_length=30)
    assert (
        network_of(odd).max_length == 28
        and network_of(dataclasses.replace(odd, block=8)).max_length == 24
    )
    assert network_of(dataclasses.replace(odd, blocks=(4, 6))).max_length == 24
    decoder = decode.BlockDenoising(network_of(odd), 30, TokenSpec(mask=31, alignment="own"))
    with pytest.raises(
        ValueError, match="size 30 is more than the 28 positions the model was built for"
    ):
        decode.run(decoder, None, decode.make_request([[1, 2]], max_new_tokens=27))


def test_a_block_of_one_is_causal():
    single = dataclasses.replace(BLOCKS, block=1)
    fields = {
        name: value
        for name, value in BLOCKS.to_dict().items()
        if name not in ("block", "blocks", "origin")
    }
    causal = dataclasses.replace(BASE, **fields)
    logits, want = (
        read(TransformerNetwork(c), params_of(BLOCKS), TOKENS)[0] for c in (single, causal)
    )
    np.testing.assert_allclose(logits, want, atol=ATOL)
