"""Recorded arrays of SDAR's network: prompt, cache, a block on top of it, the layout of training.

Sizes, block length and mask id are read from the arrays and the config.
"""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from reading import positions_of, read
from recorded import equal
from recorded_block_diffusion import FOLDER, arrays, assert_close, model

from paradec_jax.convert.engine import read_json
from paradec_jax.decode import Prefix
from paradec_jax.nn import masks

TOLERANCE = 2e-4
READ = {  # arrays of forward.npz, each by the test that compares it
    *("prefix_ids", "prefix_logits", "prefix_hidden", "cache_k", "cache_v"),
    *("block_ids", "block_logits", "block_hidden"),
    *("full_ids", "full_mask", "full_logits"),
    *("dual_ids", "dual_positions", "dual_mask", "dual_logits", "dual_hidden"),
}


def row(name: str) -> jax.Array:
    """A recorded array of integers as a batch of one."""
    return jnp.asarray(arrays("forward")[name], jnp.int32)[None]


def close(got: jax.Array, name: str, part: slice = slice(None)) -> None:
    """What was computed of a row is the recorded array, or a part of it."""
    assert_close(got, arrays("forward")[name][part], TOLERANCE)


@cache
def prompt():
    network, params, _ = model()
    return read(network, params, row("prefix_ids"))


def test_every_recorded_array_is_compared():
    assert arrays("forward").keys() == READ


def test_the_model_is_the_one_that_the_folder_tells_of():
    network, _, spec = model()
    fields = read_json(FOLDER / "config.json")
    assert (network.visibility, network.block) == ("block", fields["block_size"])
    assert (spec.mask, spec.alignment) == (fields["mask_token_id"], "own")
    assert (
        spec.mask in arrays("forward")["block_ids"]
        and spec.mask not in arrays("forward")["prefix_ids"]
    )


def test_prompt():
    logits, hidden, kv = prompt()
    close(logits[0], "prefix_logits")
    close(hidden[0], "prefix_hidden")
    close(jnp.stack([jnp.swapaxes(layer.k[0], -1, -2) for layer in kv]), "cache_k")
    close(jnp.stack([layer.v[0] for layer in kv]), "cache_v")


@pytest.mark.parametrize("prepared", [False, True], ids=["raw", "prepared"])
def test_a_block_on_top_of_the_cache(prepared):
    """Through a cache with room to spare, whose later positions are scratch."""
    network, params, _ = model()
    start, tokens = row("prefix_ids").shape[1], row("block_ids")
    cache = network.init_cache(jnp.zeros(1), start + tokens.shape[1])
    cache = network.write(cache, prompt()[2], jnp.zeros(1, jnp.int32))
    params = network.prepare(params) if prepared else params
    prefix = Prefix(cache, jnp.array([start]))
    logits, hidden, _ = read(network, params, tokens, positions_of(tokens, start), prefix)
    close(logits[0], "block_logits")
    close(hidden[0], "block_hidden")


def test_all_blocks_without_a_cache():
    network, params, _ = model()
    tokens = row("full_ids")
    positions = positions_of(tokens)
    seen = masks.block_causal(positions, network.block)
    equal(seen[0], arrays("forward")["full_mask"])
    logits, _, _ = read(network, params, tokens, positions)
    close(logits[0], "full_logits")
    close(logits[0, -row("block_ids").shape[1] :], "block_logits")


def test_the_doubled_layout_of_training():
    network, params, _ = model()
    half = row("dual_ids").shape[1] // 2
    positions, block = row("dual_positions")[:, :half], network.block
    equal(row("dual_positions")[:, half:], positions)
    noisy = [masks.block_diagonal(positions, block), masks.strictly_before(positions, block)]
    whole = masks.block_causal(positions, block)
    mask = jnp.block([noisy, [jnp.zeros_like(whole), whole]])
    equal(mask[0], arrays("forward")["dual_mask"])
    logits, hidden, _ = read(network, params, row("dual_ids"), row("dual_positions"), None, mask)
    close(logits[0], "dual_logits")
    close(hidden[0], "dual_hidden")
