"""Compiled programs side by side: XLA's own count of operations, memory, and wall time in turns."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function and what it is called with."""

    compiled: Any
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable, *arguments: Any) -> "Compiled":
        """Compiles a function for these arguments."""
        return cls(jax.jit(function).lower(*arguments).compile(), arguments)

    @property
    def flops(self) -> int:
        """Floating-point operations by XLA's cost analysis, which counts the body of a loop once."""
        return int(self.compiled.cost_analysis()["flops"])

    @property
    def temporary_bytes(self) -> int:
        """Memory that a call needs besides arguments and results."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    def seconds(self) -> float:
        """Wall time of one call, result awaited."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return time.perf_counter() - start


def timed(programs: Mapping[str, Compiled], passes: int = 5) -> dict[str, dict[str, Any]]:
    """XLA's count and wall times of each program: all take their turn in every pass, after one that is not counted.

    Args:
      programs: by name.
      passes: timings of each, of which `seconds` is the median.

    Raises:
      ValueError: `passes` below 1.
    """
    if passes < 1:
        raise ValueError(f"passes must be at least 1, not {passes}")
    for program in programs.values():
        program.seconds()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(passes):
        for name, program in programs.items():
            times[name].append(program.seconds())
    return {
        name: {
            "xla_flops": program.flops,
            "temporary_bytes": program.temporary_bytes,
            "seconds": statistics.median(times[name]),
            "passes": times[name],
        }
        for name, program in programs.items()
    }
