"""Benchmarks read from files that the user brings; nothing is downloaded and no data is bundled.

A benchmark is two pure functions: `read(path)` gives items, and `score(item, text)` judges the continuation of
an item's prompt, or `program(item, text)` gives what has to be run to judge it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from paradec_jax.evaluate.benchmarks import gsm8k, humaneval, math500, mbpp
from paradec_jax.evaluate.benchmarks.items import Item, Source
from paradec_jax.evaluate.execution import Sample

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Source"]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """How a benchmark is read and judged.

    Attributes:
      read: items from a path; options `shots` and `examples`.
      measures: fields of a score that are true or false, the one to be reported first.
      shots: solved examples unless told otherwise.
      max_new_tokens: tokens of a continuation unless told otherwise.
      score: a score from an item and its continuation, where reading suffices.
      program: what to run, where the continuation is code.
    """

    read: Callable[..., Source]
    measures: tuple[str, ...]
    shots: int
    max_new_tokens: int
    score: Callable[[Item, str], Any] | None = None
    program: Callable[[Item, str], Sample] | None = None


BENCHMARKS = {
    "gsm8k": Benchmark(gsm8k.read, ("flexible", "strict"), gsm8k.SHOTS, 256, score=gsm8k.score),
    "math500": Benchmark(math500.read, ("equal",), 0, 512, score=math500.score),
    "humaneval": Benchmark(humaneval.read, ("passed",), 0, 512, program=humaneval.program),
    "mbpp": Benchmark(mbpp.read, ("passed",), len(mbpp.EXAMPLES), 256, program=mbpp.program),
}
