"""All that the parts use of the modules that measure time, and a clock for what takes turns."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from paradec_jax.evaluate.intervals import speedup
from paradec_jax.timing.bench import (
    Limits,
    Programs,
    compile_once,
    copy_rate,
    figures,
    paced_wavefront,
    product_rate,
    read_rate,
    read_seconds,
)
from paradec_jax.timing.throughput import Case, Speed, compile_all, measure

__all__ = [
    "Case",
    "Limits",
    "Programs",
    "Speed",
    "compile_all",
    "compile_once",
    "copies",
    "figures",
    "lengthened",
    "limits_for",
    "measure",
    "once",
    "paced_wavefront",
    "products",
    "read_seconds",
    "reads",
    "speedup",
    "turns",
    "warm",
]

MOST_READ = 2**30  # bytes of the matrix whose reading is timed: more than any cache holds
REPEATS = 3
LEAST, MOST_STEPS = 0.05, 1000  # seconds of a timed loop at least, and by how much it may be lengthened


# Measured once in a process.
copies = functools.lru_cache(copy_rate)
reads = functools.lru_cache(read_rate)
products = functools.lru_cache(product_rate)


def limits_for(dtype: str, weights: int, core: int = 0) -> Limits:
    """The limits of the device for so many bytes of weights, of which a recurrence reads `core` again."""
    read, again = (reads(dtype, min(size, MOST_READ), REPEATS) for size in (weights, core or weights))
    return Limits(copies(REPEATS), read, again, products(dtype, REPEATS))


def once(call: Callable[[], Any]) -> float:
    """Seconds of one call, its result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def warm(call: Callable[[], Any]) -> float:
    """Seconds of the second of two calls: the first one is slower."""
    once(call)
    return once(call)


def lengthened(seconds: float, steps: int) -> tuple[float, int]:
    """Seconds and steps of a loop that took so long for its first so many: LEAST seconds, or the first steps."""
    longer = max(steps, math.ceil(steps * LEAST / max(seconds, LEAST / MOST_STEPS)))
    return seconds * longer / steps, longer


def turns(
    calls: Mapping[str, Callable[[], Any]], passes: int, enough: Callable[[], bool] = lambda: False
) -> dict[str, list[float]]:
    """Seconds of each call in each pass; all take their turn in every pass, and each has been called before.

    Args:
      calls: by name.
      passes: at most; two at least.
      enough: asked after each pass; true ends the measurement.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(1, passes + 1):
        for name, call in calls.items():
            seconds[name].append(once(call))
        if done >= 2 and enough():
            break
    return seconds
