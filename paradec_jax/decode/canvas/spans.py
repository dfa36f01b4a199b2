"""Which span of a canvas a call reads: all of it, or a window that sees the rest in the cache.

::

    position    0 1 2 3   4 5 6 7   8 9         blocks of 4, the open one at 4
    renews    [ p p a b   c _ _ _   _ _ ]       the whole canvas, whose keys and values fill the cache
    others      . . . . [ c _ _ _ ] . .         a window; what it may see (.) is in the cache
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.canvas.blocks import AnyBlocks, BlockRead
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.shapes import unless_idle
from paradec_jax.decode.rules.windows import where_rows, window


def read_span(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    renews: Bool[Array, "B"],
    width: int,
    visible: Bool[Array, "B S"] | Bool[Array, "B W S"],
) -> tuple[AnyBlocks, BlockRead]:
    """One call on the whole canvas of rows that renew their cache, and on a window of the others.

    A batch may need both; what no running row needs is skipped.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: the canvas, whose open block begins at `cached`.
      renews: rows that read the whole canvas, [B].
      width: positions of the window, which begins with the open block.
      visible: what the window sees of the cache.

    Returns:
      The canvas with counts, and with the new cache of rows that renewed theirs; what was read of
      the window.
    """
    network, at, running = decoder.network, canvas.cached, ~canvas.rows.done
    start = jnp.zeros_like(at)

    def read(at: Int[Array, "B"], width: int, prefix: Prefix | None) -> tuple[Array, Any, Any]:
        tokens, positions, _, mask = canvas.window(at, width)
        out = network.forward(params, tokens, positions, prefix, mask)
        return out.hidden, out.kv, {name: start + amount for name, amount in out.counts.items()}

    def part() -> tuple[Any, ...]:
        hidden, kv, counts = read(at, width, Prefix(canvas.cache, visible))
        return hidden, hidden[:, :1] if canvas.previous is None else canvas.previous, kv, counts

    def whole() -> tuple[Any, Any]:
        hidden, kv, counts = read(start, canvas.shown.shape[1], None)
        before = window(hidden, jnp.maximum(at - 1, 0), 1)
        wide = window(hidden, at, width), before, network.pick(kv, at, width), counts
        cache = network.write(canvas.cache, kv, start)
        return where_rows(renews, (cache, wide), (canvas.cache, narrow))

    narrow = unless_idle(part, ~renews & running)
    needed = jnp.any(renews & running)
    cache, (hidden, before, kv, counts) = lax.cond(needed, whole, lambda: (canvas.cache, narrow))
    previous = before if decoder.spec.alignment == "next" else None
    positions = jnp.where(renews, canvas.inside.sum(1), window(canvas.inside, at, width).sum(1))
    canvas = dataclasses.replace(canvas.spend(counts, positions), cache=cache, previous=previous)
    opened = hidden[:, : canvas.block]
    return canvas, BlockRead(opened, hidden, at, kv, running, jnp.zeros_like(running))
