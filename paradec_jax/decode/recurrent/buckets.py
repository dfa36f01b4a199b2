"""Narrower windows that are compiled as well: a wave of a few positions need not pay for the whole window.

Speed alone: what a slot computes does not depend on the slots after it. A rule says what is done with the window that
`state.wave` has and knows nothing of widths; `on_narrowest` around it cuts the window and fills it up again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from paradec_jax.decode.rules.windows import pad_slots

Predicted = TypeVar("Predicted")

SPACING = 3  # a width that is less than so many times narrower than the next saves too little to be compiled


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
        def on(width: int) -> Any:
            some = dataclasses.replace(state, wave=state.wave.first(width))
            new: Any = predict(decoder, params, some, knobs)
            window = decoder.window
            slots = {f.name: getattr(new, f.name) for f in dataclasses.fields(new)}
            kv, counts = slots.pop("kv"), slots.pop("counts")
            slots = jax.tree.map(lambda x: pad_slots(x, window), slots)
            return dataclasses.replace(new, kv=decoder.network.widen(kv, window), counts=counts, **slots)

        widths = compiled_widths(decoder)
        if len(widths) == 1:
            return predict(decoder, params, state, knobs)
        needed = jnp.max(jnp.where(state.rows.done, 1, state.wave.active))
        chosen = jnp.searchsorted(jnp.asarray(widths), needed)
        return lax.switch(chosen, [functools.partial(on, width) for width in widths])

    return narrowed


def compiled_widths(decoder: Any) -> tuple[int, ...]:
    """The widths that are compiled, ascending, the window last.

    They are the decoder's `buckets`. Where it names none they are powers of two, each at most a third of the next
    wider one. They hold a wave that has been opened, of more than `headway` slots. Where reverse mode crosses the
    step there is the window alone, since something of every width would be kept.
    """
    if decoder.buckets is not None:
        return (*decoder.buckets, decoder.window)
    widths = [decoder.window]
    while not decoder.bounded:
        power = max(widths[0] // SPACING, 1).bit_length() - 1
        if not decoder.headway < 2**power < widths[0]:
            break
        widths.insert(0, 2**power)
    return tuple(widths)


def check_buckets(buckets: tuple[int, ...] | None, window: int) -> None:
    """Refuses widths that do not ascend from 1 to below the window; None leaves the choice. Raises ValueError."""
    widths = [] if buckets is None else list(buckets)
    if any(not 1 <= b < window for b in widths) or widths != sorted(set(widths)):
        raise ValueError(f"buckets must ascend from 1 to below the window {window}, not {buckets}")
