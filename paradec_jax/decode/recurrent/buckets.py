"""Narrower windows that are compiled as well: a wave of a few positions need not pay for the whole window.

Speed alone: what a slot computes does not depend on the slots after it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from paradec_jax.decode.recurrent.wave import Prediction, Wave


def predict_on_narrowest(
    predict: Callable[[Wave], Prediction],
    wave: Wave,
    running: Bool[Array, "B"],
    buckets: tuple[int, ...],
    network: Any,
) -> Prediction:
    """`predict` on the narrowest bucket that holds every running wave, with zeros in the slots after it.

    Args:
      predict: what is to be done with the first slots of the wave.
      wave: all slots, W.
      running: rows whose waves count.
      buckets: widths below W, ascending; none runs `predict` on the whole window.
      network: widens keys and values.
    """
    window = wave.tokens.shape[1]
    if not buckets:
        return predict(wave)
    widths = (*buckets, window)
    needed = jnp.max(jnp.where(running, wave.active, 1))
    branches = [lambda w=w: _widened(predict(wave.first(w)), network, window) for w in widths]
    return lax.switch(jnp.searchsorted(jnp.asarray(widths), needed), branches)


def _widened(new: Prediction, network: Any, window: int) -> Prediction:
    def widen(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, window - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

    log_probs = None if new.log_probs is None else widen(new.log_probs)
    kv = network.widen(new.kv, window)
    return Prediction(
        widen(new.states), widen(new.conditioning), kv, new.counts, widen(new.tokens), log_probs
    )


def check_buckets(buckets: tuple[int, ...], window: int) -> None:
    """Refuses widths that do not ascend from 1 to below the window. Raises ValueError."""
    if any(not 1 <= b < window for b in buckets) or list(buckets) != sorted(set(buckets)):
        raise ValueError(f"buckets must ascend from 1 to below the window {window}, not {buckets}")
