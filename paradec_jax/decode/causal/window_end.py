"""Where the window of Jacobi decoding ends: running, by blocks, or with blocks in flight (Algorithm 1)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.rules import select


def window_end(
    length: Int[Array, "B"],
    start: Int[Array, "B"],
    old: Int[Array, "B"],
    agreed: Int[Array, "B"],
    spawn: Any,
    *,
    block: int,
    blocks: int,
    running: bool,
) -> Int[Array, "B"]:
    """The position at which the window of the next call ends; its first token, the newest, stands at length - 1.

    ::

        running       length - 1 + n             the window is always full
        one block     f + n                      f: start of the block of the newest token
        K blocks      old, + n where a block is spawned, from f + n to f + K n

    Args:
      length: committed tokens.
      start: where the first block starts, the prompt's length.
      old: the end so far, `start` before the first call.
      agreed: tokens of the newest block that are settled, see `newest_block_agreement`.
      spawn: r, share of a block; not read with one block.
      block, blocks: n, K.
      running: the running window, which has no blocks.
    """
    if running:
        return length - 1 + block
    first = start + (length - 1 - start) // block * block
    if blocks == 1:
        return first + block
    enough = spawn * block - 1e-4  # in float32 0.6 * 25 is above 15
    spawned = old + block * (agreed >= enough)
    spawned = jnp.where(jnp.asarray(spawn) <= 0, first + blocks * block, spawned)
    return jnp.clip(spawned, first + block, first + blocks * block)


def newest_block_agreement(
    agrees: Bool[Array, "B drafts"], at: Int[Array, "B"], end: Int[Array, "B"], block: int
) -> Int[Array, "B"]:
    """Tokens of the newest block that are committed or lead it and agree with their prediction.

    Args:
      agrees: which drafts of the window agree.
      at: position of the newest committed token; the drafts stand after it.
      end: where the window ends, hence the newest block.
      block: n.
    """
    begin = end - block
    position = at[:, None] + 1 + jnp.arange(agrees.shape[1])
    before = position < begin[:, None]
    committed = jnp.clip(at + 1 - begin, 0, block)
    run = select.leading_run(agrees | before) - jnp.sum(before, axis=1)
    return committed + jnp.maximum(run, 0)
