"""The calls of a block decoder: on the prompt's whole blocks, then on one block after the other, and
to judge its drafts.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas import AnyBlocks, BlockCanvas, BlockRead, Canvas, read_states
from paradec_jax.decode.machine import Prefix, Reading, Request, Windows, forward_tree, unless_idle
from paradec_jax.decode.rules import last_of, window
from paradec_jax.nn import masks


def fresh(decoder: Any, request: Request, overrun: int = 0, blocks: int = 2) -> BlockCanvas:
    """The canvas before any call: given tokens, masks, an empty cache, room for so many blocks more."""
    block = decoder.block
    rows = decoder.begin(request, blocks * block, overrun)
    canvas = Canvas.of(rows, decoder.mask, block, decoder.origin)
    return BlockCanvas(
        **vars(canvas),
        cache=decoder.empty_cache(request, rows.tokens.shape[1]),
        cached=canvas.block_at(rows.length),
        step=jnp.zeros_like(rows.length),
        previous=None,
    )


def read_prompt(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    request: Request,
    opens: bool,
    vectors: Array | None = None,
    causal: bool = False,
) -> tuple[AnyBlocks, BlockRead]:
    """Reads the whole blocks that each row is given in one call, and commits nothing.

    Args:
      canvas: fresh canvas.
      request: what was asked for.
      opens: read each row's open block along with them. Otherwise a row without a whole block calls
        nothing.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
      causal: no position of the whole blocks sees a later one.
    """
    network, block, cached = decoder.network, canvas.block, canvas.cached
    prompt, from_prompt = request.tokens.shape[1], canvas.origin != "start"
    width = max((prompt if from_prompt else prompt // block * block) + block * opens, block)

    def call() -> tuple[Any, ...]:
        positions = jnp.broadcast_to(jnp.arange(width), (len(cached), width))
        inputs = (canvas.rows.tokens if vectors is None else vectors)[:, :width]
        mask = None
        if from_prompt or block != network.block or causal:
            mask = masks.block_causal(positions, block, canvas.first)
            if causal:
                mask &= masks.causal(width) | (positions >= cached[:, None])[..., None]
        out = network.forward(params, inputs, positions, Prefix(canvas.cache, None), mask)
        return out.hidden, out.kv, out.counts

    needed = (cached > 0) | opens
    hidden, kv, counts = call() if opens else unless_idle(call, needed)
    counts = {name: amount * needed for name, amount in counts.items()}
    canvas = canvas.spend(counts, cached + block * opens, needed.astype(jnp.int32))
    if decoder.spec.alignment == "next":
        canvas = dataclasses.replace(canvas, previous=last_of(hidden, jnp.maximum(cached, 1)))
    return canvas, BlockRead(
        hidden=window(hidden, cached, block) if opens else hidden[:, :block],
        window=hidden,
        at=jnp.zeros_like(cached),
        kv=kv,
        reads=~canvas.rows.done & opens,
        stored=cached > 0,
        prompt=True,
    )


def read_block(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    fuse: bool,
    vectors: Array | None = None,
    causal: Bool[Array, "B W"] | None = None,
) -> tuple[AnyBlocks, BlockRead]:
    """One call on what follows each row's trusted cache: its open block, or one to be stored.

    ::

        open block      | a _ c _ |              window B
        clean block     | a b c d | _ _ _ _ |    window 2B, where the next block's first step is
                                                 fused with the store

    The call has the wide window only where a running row needs it. The canvas is then at the open
    block.

    Args:
      canvas: canvas before the call, which begins at `cached`.
      fuse: read the block after a clean one along with it.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
      causal: rows of the block at `cached` that see no later one of it; None where all see it whole.
    """
    at, clean, running = canvas.cached, canvas.clean, ~canvas.rows.done
    inputs = window(canvas.rows.tokens if vectors is None else vectors, at, canvas.block)
    first, follows = jnp.zeros_like(at), clean if fuse else None
    canvas, call = read_states(
        decoder, params, canvas, inputs[:, None], running[:, None], first, follows, vectors, causal
    )
    hidden = call.each[:, 0]
    canvas = canvas.after_block(clean, canvas.block, hidden[:, -1:])
    return canvas, canvas.path(call, hidden, clean)


def ask_verifier(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    drafts: Int[Array, "B W"],
    rows: Bool[Array, "B"],
) -> tuple[AnyBlocks, Float[Array, "B W V"]]:
    """One call in which the network says of each position what it expects, given the tokens before
    it alone; skipped where no row asks.

    ::

        fed           a b c d | _ _ _ _       the block with its drafts, and a mask a position
        position      4 5 6 7 | 4 5 6 7
        c sees        a b c   |               token-causally, what is cached too
        mask at 6     a b     |     _         the drafts before its position, and itself

    Where logits are about the next position, the rows of the drafts themselves say it, without
    masks.

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
        unknown = jnp.full((len(at), block, block), decoder.mask, jnp.int32)
        tokens = jnp.concatenate([tokens, unknown], axis=1)
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
