"""Which span of a canvas a call reads: all of it, or a window that sees the rest in the cache.

::

    position    0 1 2 3   4 5 6 7   8 9         blocks of 4, the open one at 4
    renews    [ p p a b   c _ _ _   _ _ ]       the whole canvas, whose keys and values fill the cache
    dual        . . . . [ c _ _ _ ] . .         the block; what it may see (.) is in the cache
    prefix      . . . . [ c _ _ _   _ _ ]       the block and what follows, as far as a row goes
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.canvas.blocks import AnyBlocks
from paradec_jax.decode.canvas.canvas import AnyCanvas
from paradec_jax.decode.machine import Forward, Prefix, on_smallest
from paradec_jax.decode.rules import number_of, pad_slots, where_rows, window


def read_canvas(
    decoder: Any, params: Any, canvas: Any, at: Array, width: int, prefix: Any
) -> Forward:
    """A call on a window of each row's canvas, with hidden states *about* its positions: of
    alignment "next" those of the positions before, so that of the first one is not to be used; and
    with counts of each row.
    """
    tokens, positions, _, mask = canvas.window(at, width)
    out = decoder.read(params, canvas, tokens, positions, prefix, mask)
    counts = {name: jnp.zeros_like(at) + amount for name, amount in out.counts.items()}
    hidden = out.hidden if decoder.spec.alignment == "own" else jnp.roll(out.hidden, 1, axis=1)
    return dataclasses.replace(out, hidden=hidden, counts=counts)


def read_whole(
    decoder: Any, params: Any, canvas: AnyCanvas
) -> tuple[AnyCanvas, Float[Array, "B S D"]]:
    """One call on each row's whole canvas, without a cache: the canvas with counts, and hidden
    states about its positions.
    """
    start = jnp.zeros_like(canvas.rows.length)
    out = read_canvas(decoder, params, canvas, start, decoder.size, None)
    return canvas.spend(out.counts, decoder.readings * canvas.inside.sum(axis=1)), out.hidden


def read_span(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    renews: Bool[Array, "B"],
    before: int = 0,
    dual: bool = True,
) -> tuple[AnyBlocks, Float[Array, "B W D"]]:
    """One call on the whole canvas of rows that renew their cache, and on a window of the others.

    A batch may need both; what no running row needs is skipped. Without a cache all rows read the
    whole canvas.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: the canvas, whose block begins at `cached`.
      renews: rows that read the whole canvas.
      before: positions before the block that its window begins with.
      dual: see in the cache what follows the block, instead of reading it along.

    Returns:
      The canvas with counts, and with the new cache of rows that renewed it; hidden states about
      the block's positions.
    """
    size, block, cache = decoder.size, canvas.block, canvas.cache
    running, start = ~canvas.rows.done, jnp.zeros_like(canvas.cached)
    inside = number_of(canvas.inside)

    def about(hidden: Array) -> Array:
        return window(pad_slots(hidden, size + block), canvas.cached, block)

    if cache is None:
        canvas, hidden = read_whole(decoder, params, canvas)
        return canvas, about(hidden)

    at, place = canvas.cached - before, jnp.arange(size)
    visible = canvas.inside[:, :size] & (place < at[:, None])
    needs = jnp.minimum(inside - at, block + before)
    widths = [block + before]
    if dual:
        visible |= canvas.inside[:, :size] & (place >= (at + block + before)[:, None])
    else:
        needs = inside - at
        while widths[-1] < size:
            widths.append(min(2 * widths[-1], size))

    def narrow(width: int) -> Any:
        out = read_canvas(decoder, params, canvas, at, width, Prefix(cache, visible))
        return out.hidden[:, before : before + block], out.counts

    renews, fits = renews & running, needs[:, None] <= jnp.asarray(widths)
    others = running & ~renews
    short, counts = on_smallest(narrow, widths, fits | ~others[:, None], others)

    def renewed() -> Any:
        out = read_canvas(decoder, params, canvas, start, size, None)
        kept = decoder.reader.write(cache, out.kv, start)
        return where_rows(renews, (kept, about(out.hidden), out.counts), (cache, short, counts))

    new, hidden, counts = lax.cond(jnp.any(renews), renewed, lambda: (cache, short, counts))
    canvas = canvas.spend(counts, decoder.readings * jnp.where(renews, inside, needs))
    return dataclasses.replace(canvas, cache=new), hidden
