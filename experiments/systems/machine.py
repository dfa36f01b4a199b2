"""A machine in words, what of its memory is free, how fast it reads and multiplies, and calls timed
in
turns.
"""

import concurrent.futures
import dataclasses
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from paradec_jax import facts

PASSES = 5


def in_words(record: Mapping[str, Any]) -> str:
    """One line for people: the device, the versions and the commit of a record."""
    of, jax_version = record["device"], record["versions"]["jax"]
    cores = f"{of['threads']} threads" + (f" of {of['cores']} cores" if of["cores"] else "")
    memory = of["device_memory_bytes"] or of["memory_bytes"]
    parts = [of["kind"], f"{memory / 2**30:.0f} GiB" if memory else ""]
    parts += [cores if of["platform"] == "cpu" else f"beside {of['processor']}, {cores}"]
    parts += [
        f"jax {jax_version}",
        f"commit {record['commit'][:12]}" if record["commit"] else "no commit known",
    ]
    return ", ".join(part for part in [*parts, record["date"]] if part)


def memory_left() -> int | None:
    """Bytes that can still be had on the default device, None where nothing tells."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return facts.memory("MemAvailable")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each pass, by the clock and of all threads of the process."""

    wall: tuple[float, ...]
    busy: tuple[float, ...]

    def each(self, count: float, less: "Timing | None" = None) -> "Timing":
        """Seconds of one of `count` equal parts, of what this takes longer than another where one
        is given.
        """
        other = less or Timing((0.0,) * len(self.wall), (0.0,) * len(self.busy))
        pairs = ((self.wall, other.wall), (self.busy, other.busy))
        return Timing(*(tuple(np.maximum(np.subtract(*pair), 1e-9) / count) for pair in pairs))

    @property
    def seconds(self) -> float:
        """Median by the clock."""
        return statistics.median(self.wall)


class Clock:
    """The time that is left for a part."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(self.end - time.monotonic(), 0.0)


def in_turns(
    calls: Mapping[Any, Callable[[], Any]], clock: Clock, passes: int = PASSES
) -> dict[Any, Timing]:
    """Times calls that were warmed up, each in its turn in every pass: two passes, and more while
    time is left.
    """
    taken: dict[Any, list[tuple[float, float]]] = {name: [] for name in calls}
    for done in range(passes):
        if done >= 2 and not clock.left():
            break
        for name, call in calls.items():
            wall, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            taken[name].append((time.perf_counter() - wall, time.process_time() - busy))
    return {name: Timing(*zip(*pairs, strict=True)) for name, pairs in taken.items()}


def compiled(
    jobs: Mapping[str, Callable[[], Any]], clock: Clock
) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs jobs that compile, several at once; what came out in time, and why the others did not."""
    pool = concurrent.futures.ThreadPoolExecutor(facts.device()["threads"])
    futures = {name: pool.submit(job) for name, job in jobs.items()}
    concurrent.futures.wait(futures.values(), timeout=min(clock.left(), threading.TIMEOUT_MAX))
    pool.shutdown(wait=False, cancel_futures=True)
    done, left = {}, {}
    for name, future in futures.items():
        if future.cancelled() or not future.done():
            left[name] = "not compiled in time"
        elif (error := future.exception()) is not None:
            left[name] = " ".join(str(error).split())[:200] or type(error).__name__
        else:
            done[name] = future.result()
    return done, left


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second of each way to read a large array, operations a second of products, and the
    timings of both.
    """

    ways: dict[str, float]
    flops: float
    timings: dict[str, Timing]

    @property
    def read(self) -> float:
        """Bytes a second of the quickest way."""
        return max(self.ways.values())


def reading_ways(dtype: str, side: int, repeats: int) -> dict[str, Callable[[], Any]]:
    """Programs that read a square matrix `repeats` times. Each reading depends on the one before
    it.
    """
    matrix = jnp.full((side, side), 1 / side, dtype)

    def sums(matrix: Array) -> Array:
        def body(_: Array, carry: Array) -> Array:
            return jnp.max(jnp.sum(matrix + carry.astype(dtype), axis=1, dtype=jnp.float32)) * 1e-20

        return lax.fori_loop(0, repeats, body, jnp.float32(0))

    def products(matrix: Array, rows: Array, axis: int) -> Array:
        def body(_: Array, rows: Array) -> Array:
            sums = jnp.tensordot(rows, matrix, (1, axis), preferred_element_type=jnp.float32)
            return (sums * 1e-3 + 1).astype(rows.dtype)

        return lax.fori_loop(0, repeats, body, rows)

    ways: dict[str, Callable[[], Any]] = {"sum": functools.partial(jax.jit(sums), matrix)}
    for count in (1, 8):
        for axis in (0, 1):
            program = jax.jit(functools.partial(products, axis=axis))
            name = f"product with {count} row{'s' * (count > 1)}" + ", transposed" * axis
            ways[name] = functools.partial(program, matrix, jnp.ones((count, side), dtype))
    return ways


@functools.lru_cache
def rates(dtype: str) -> Rates:
    """Measures the default device, once in a process.

    Ways to read: a sum of an array in `dtype`, products of one and of eight rows with a matrix, and
    a copy, of which bytes read and written count.
    """
    cpu = jax.default_backend() == "cpu"
    size = jnp.dtype(dtype).itemsize
    side, repeats = math.isqrt((2**28 if cpu else 2**30) // size), 2 if cpu else 16
    calls = reading_ways(dtype, side, repeats)
    moved = dict.fromkeys(calls, repeats * size * side**2)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = [copy(jnp.zeros(side**2, dtype))]

    def copies() -> Any:
        for _ in range(repeats):
            buffer[0] = copy(buffer[0])
        return buffer[0]

    calls["copy"], moved["copy"] = copies, 2 * moved["sum"]
    edge = 2048 if cpu else 8192
    square = jnp.ones((edge, edge), dtype)
    product = jax.jit(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32))
    calls["square product"] = functools.partial(product, square, square)
    for call in calls.values():
        jax.block_until_ready(call())
    timings = in_turns(calls, Clock())
    ways = {name: moved[name] / min(timings[name].wall) for name in moved}
    return Rates(ways, 2 * edge**3 / min(timings["square product"].wall), timings)
