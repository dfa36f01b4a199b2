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

from paradec_jax.decode.canvas.blocks import BlockCanvas, BlockRead
from paradec_jax.decode.machine import Prefix, unless_idle
from paradec_jax.decode.rules import where_rows, window


def read_span(
    decoder: Any,
    params: Any,
    canvas: BlockCanvas,
    at: Int[Array, "B"],
    width: int,
    renews: Bool[Array, "B"],
    visible: Bool[Array, "B *W S"],
) -> tuple[BlockCanvas, BlockRead]:
    """One call on the whole canvas of rows that renew their cache, and on a window of the others.

    A batch may need both; what no running row needs is skipped.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: the canvas.
      at, width: first position of the window, and how many it has.
      renews: rows that read the whole canvas.
      visible: what a window sees of the cache.

    Returns:
      The canvas with counts, and with the new cache of rows that renewed it; what was read of the
      window in either case, of which no key is stored yet.
    """
    network, cache, running = decoder.network, canvas.cache, ~canvas.rows.done
    start, renews = jnp.zeros_like(at), renews & running

    def read(at: Array, width: int, prefix: Prefix | None) -> tuple[Array, Any, Any]:
        tokens, positions, _, mask = canvas.window(at, width)
        out = network.forward(params, tokens, positions, prefix, mask)
        return out.hidden, out.kv, {name: start + amount for name, amount in out.counts.items()}

    def whole() -> Any:
        hidden, kv, counts = read(start, canvas.shown.shape[1], None)
        part = window(hidden, at, width), network.pick(kv, at, width), counts
        return where_rows(renews, (network.write(cache, kv, start), part), (cache, narrow))

    narrow = unless_idle(lambda: read(at, width, Prefix(cache, visible)), ~renews & running)
    new, (hidden, kv, counts) = lax.cond(jnp.any(renews), whole, lambda: (cache, narrow))
    positions = jnp.where(renews, canvas.inside.sum(1), window(canvas.inside, at, width).sum(1))
    canvas = dataclasses.replace(canvas.spend(counts, positions), cache=new)
    return canvas, BlockRead(hidden, hidden, at, kv, running, jnp.zeros_like(running))
