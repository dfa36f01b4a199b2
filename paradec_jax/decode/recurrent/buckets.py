"""Narrower windows that are compiled as well: a wave of a few positions need not pay for the whole window.

Speed alone: what a slot computes does not depend on the slots after it. A rule says what is done with the window that
`state.wave` has and knows nothing of widths; `on_narrowest` around it cuts the window and fills it up again.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paradec_jax.decode.rules.windows import pad_slots

Predicted = TypeVar("Predicted")

# Milliseconds of a step by positions in it: tiny-recurrent at r' = 4 over a cache of 256 positions, quickest of 15
# passes of 10 steps, AMD EPYC, 2 cores, other work beside it. `python -m experiments.systems.width_cost` measures it
# anew, and says which widths would follow.
COST = {1: 0.44, 2: 0.70, 3: 0.90, 6: 1.5, 16: 3.2, 32: 4.6, 64: 9.7, 96: 13.5, 128: 22.0}
SHARE = 0.42  # of what the next wider program costs: a narrower one must be worth its compilation


def on_narrowest(
    predict: Callable[[Any, Any, Any, Any], Predicted],
) -> Callable[[Any, Any, Any, Any], Predicted]:
    """A method `predict(decoder, params, state, knobs)`, run on the narrowest compiled width that holds every wave.

    The decoder has `window`, W, and `buckets`; `state.wave` has W slots, `first(w)` of them, and how many are
    `active`. What the method returns is a dataclass of arrays [B, W, ...] beside `kv` and `counts`; slots after the
    width are zero.
    """

    @functools.wraps(predict)
    def narrowed(decoder: Any, params: Any, state: Any, knobs: Any) -> Predicted:
        def on(width: int) -> Predicted:
            some = dataclasses.replace(state, wave=state.wave.first(width))
            return _widened(predict(decoder, params, some, knobs), decoder.network, decoder.window)

        widths = compiled_widths(decoder, state.rows.length.shape[0])
        if len(widths) == 1:
            return predict(decoder, params, state, knobs)
        needed = jnp.max(jnp.where(state.rows.done, 1, state.wave.active))
        chosen = jnp.searchsorted(jnp.asarray(widths), needed)
        return lax.switch(chosen, [functools.partial(on, width) for width in widths])

    return narrowed


def compiled_widths(decoder: Any, batch: int) -> tuple[int, ...]:
    """The widths that are compiled for so many rows, ascending, the window last.

    They are the decoder's `buckets`. Where it names none they follow from the cost curve: powers of two, each of
    which costs at most `SHARE` of the next wider one and holds a wave that has been opened, of more than `headway`
    slots. The curve is the CPU's, so elsewhere there is the window alone, and so where reverse mode crosses the step,
    which would keep something of every width.
    """
    if decoder.buckets is not None:
        return (*decoder.buckets, decoder.window)
    if jax.default_backend() != "cpu" or decoder.bounded:
        return (decoder.window,)
    return widths_by(COST, decoder.window, decoder.headway, batch)


def widths_by(curve: Mapping[int, float], window: int, headway: int = 1, batch: int = 1) -> tuple[int, ...]:
    """The widths that are worth their compilation by a cost curve, ascending, the window last."""
    widths = [window]
    for width in (1 << power for power in reversed(range(window.bit_length()))):
        worth = cost(batch * width, curve) <= SHARE * cost(batch * widths[0], curve)
        if headway < width < window and worth:
            widths.insert(0, width)
    return tuple(widths)


def cost(positions: int, curve: Mapping[int, float] = COST) -> float:
    """Milliseconds of a step by a curve, between its ascending entries on a line, after the last in proportion."""
    most = max(curve)
    if positions > most:
        return curve[most] * positions / most
    return float(np.interp(positions, list(curve), list(curve.values())))


def check_buckets(buckets: tuple[int, ...] | None, window: int) -> None:
    """Refuses widths that do not ascend from 1 to below the window; None leaves the choice. Raises ValueError."""
    widths = [] if buckets is None else list(buckets)
    if any(not 1 <= b < window for b in widths) or widths != sorted(set(widths)):
        raise ValueError(f"buckets must ascend from 1 to below the window {window}, not {buckets}")


def _widened(new: Any, network: Any, window: int) -> Any:
    """What a method has returned for the first slots, with zeros in the others."""

    slots = {f.name: getattr(new, f.name) for f in dataclasses.fields(new) if f.name not in ("kv", "counts")}
    return dataclasses.replace(
        new, kv=network.widen(new.kv, window), **jax.tree.map(lambda x: pad_slots(x, window), slots)
    )
