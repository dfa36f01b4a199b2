"""A block model as its own verifier: what it says of each position, given the tokens before it alone.

::

    fed           a b c d | _ _ _ _       the block with its drafts, and a mask a position
    position      4 5 6 7 | 4 5 6 7
    c sees        a b c   |               token-causally, what is cached too
    mask at 6     a b     |     _         the drafts before its position, and itself

Where logits are about the next position, the rows of the drafts themselves say it, without masks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas.blocks import AnyBlocks
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.shapes import unless_idle
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree
from paradec_jax.decode.rules.windows import window


def ask_verifier(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    drafts: Int[Array, "B W"],
    rows: Bool[Array, "B"],
) -> tuple[AnyBlocks, Float[Array, "B W V"]]:
    """One call on the block with its drafts, and on a mask at each position, which sees the drafts
    before it; skipped where no row asks.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: canvas, whose block begins at `cached`.
      drafts: tokens for its masks, [B, W].
      rows: rows that ask, [B].

    Returns:
      The canvas with counts, and the verifier's logits at each position.
    """
    network, block, at = decoder.network, canvas.block, canvas.cached
    filled = jnp.where(canvas.masked(rows), drafts, window(canvas.rows.tokens, at, block))
    own, tokens = canvas.previous is None, filled[:, None]
    if own:
        masks = jnp.full((len(at), block, block), decoder.mask, jnp.int32)
        tokens = jnp.concatenate([tokens, masks], axis=1)
    single = block * own
    index = jnp.arange(1 + single)
    windows = Windows(
        tokens,
        at[:, None] + jnp.maximum(index - 1, 0),
        jnp.repeat(rows[:, None], 1 + single, axis=1),
        parent=jnp.minimum(index - 1, 0),
        row=index - 2,
        lengths=(block, *[1] * single),
        causal=jnp.ones(tokens.shape, bool),
    )

    def read(hidden: Array) -> Reading:
        about = hidden[:, 1:, 0] if own else canvas.aligned(hidden[:, 0])
        return Reading(rest=network.logits(params, about))

    def call() -> tuple[Any, ...]:
        prefix = Prefix(canvas.cache, at)
        out = forward_tree(network, params, prefix, windows, read, bounded=True)
        return out.rest, out.counts

    logits, counts = unless_idle(call, rows)
    counts = {name: amount * rows for name, amount in counts.items()}
    return canvas.spend(counts, (block + single) * rows, rows.astype(jnp.int32)), logits
