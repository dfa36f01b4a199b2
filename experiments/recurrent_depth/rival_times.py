"""Decoders of several models timed in turns, and ratios of their speeds with a range."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paradec_jax.decode import Request
from paradec_jax.evaluate import intervals
from paradec_jax.evaluate.timing import Case, measure

INSTANT = 1e-9  # seconds that a loop takes at least, however coarse the clock


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Decoders of one model, and requests of one shape."""

    cases: Sequence[Case]
    requests: Sequence[Request]


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """What one decoder took.

    Attributes:
      generated: tokens of each request.
      each: seconds of each request, prompts included, a tuple a pass.
      prompts: seconds of reading all prompts, one a pass.
      calls: network calls after the prompts, of all requests.
    """

    generated: list[int]
    each: list[tuple[float, ...]]
    prompts: list[float]
    calls: int

    @property
    def passes(self) -> list[float]:
        """Seconds of each pass."""
        return [sum(seconds) for seconds in self.each]

    @property
    def steps(self) -> list[float]:
        """Seconds of each pass without the prompts; above 0, whatever noise there is in two
        timings.
        """
        pairs = zip(self.passes, self.prompts, strict=True)
        return [max(whole - read, INSTANT) for whole, read in pairs]

    @property
    def tokens_per_second(self) -> float:
        """By the median pass, prompts included."""
        return sum(self.generated) / statistics.median(self.passes)

    def row(self) -> dict[str, Any]:
        """As JSON values; `decode_tokens_per_second` leaves out prompts and the token that each
        predicts.
        """
        later = sum(self.generated) - len(self.generated)
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_range": [
                sum(self.generated) / end(self.passes) for end in (max, min)
            ],
            "decode_tokens_per_second": later / statistics.median(self.steps),
            "timed_problems": len(self.generated),
            "generated": self.generated,
            "each": [list(seconds) for seconds in self.each],
            "prompt_seconds": self.prompts,
            "timed_calls": self.calls,
        }


def over(first: Times, second: Times, name: str) -> dict[str, Any]:
    """How many times the tokens a second of another, under a name, and its range
    (`intervals.speedup`).
    """
    sides = [np.asarray(x) for of in (first, second) for x in (of.generated, of.each)]
    ratio, interval = intervals.speedup(*sides)
    return {name: ratio, f"{name}_range": list(interval)}


def in_turns(
    groups: Sequence[Group], passes: int, advance: Callable[[int], None] = lambda units: None
) -> list[list[Times]]:
    """Times the decoders of all groups, each once a pass, so that what else the machine does falls
    on all alike.

    Args:
      groups: each as `measure` takes it.
      passes: timings of each decoder.
      advance: told after each group of each pass that it is done.
    """
    found: list[list[Any]] = [[[] for _ in group.cases] for group in groups]
    for _ in range(passes):
        for of, group in zip(found, groups, strict=True):
            for kept, speed in zip(of, measure(group.cases, group.requests, passes=1), strict=True):
                kept.append(speed)
            advance(1)
    return [[_times(speeds) for speeds in of] for of in found]


def _times(speeds: Sequence[Any]) -> Times:
    generated = list(speeds[-1].generated)
    each = [speed.each[0] for speed in speeds]
    return Times(generated, each, [speed.init_seconds for speed in speeds], speeds[-1].calls)
