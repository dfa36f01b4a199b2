"""Ratios of what is timed as a whole, and ratios as text."""

import math
from collections.abc import Sequence

import numpy as np

from paradec_jax.evaluate.intervals import Numbers, speedup


def quicker(
    seconds: Numbers, base: Numbers, work: float | int = 1, base_work: float | int = 1
) -> tuple[float, tuple[float, float]]:
    """How many times as fast as another a thing is that is timed as a whole, and the range of
    `speedup` over passes.

    Args:
      seconds, base: seconds of each pass of the one and of the other, which took turns. A single
        pass tells nothing of the spread: its range is (0, infinity).
      work, base_work: what each did in a pass.
    """
    columns = [np.reshape(np.asarray(of, np.float64), (-1, 1)) for of in (seconds, base)]
    value, interval = speedup([work], columns[0], [base_work], columns[1])
    return value, interval if len(seconds) > 1 else (0.0, math.inf)


def times(value: float, interval: Sequence[float | None] | None = None) -> str:
    """A ratio as text with its range, or with the word that there is none; without either where
    None is given.
    """
    if interval is None:
        return f"{value:.2f}x"
    finite = [end for end in interval if end is not None and math.isfinite(end)]
    return (
        f"{value:.2f}x [{finite[0]:.2f}, {finite[1]:.2f}]"
        if len(finite) == 2
        else f"{value:.2f}x, no range"
    )
