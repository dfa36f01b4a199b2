"""How fast decoders are: several of them, timed in turns in one process, compilation kept apart."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paradec_jax.decode import Decoded, Request, run
from paradec_jax.decode.machine import checked, compiled_run
from paradec_jax.records import record

Advance = Callable[[int], None]
Seconds = tuple[float, ...]  # of each request


@record
class Case:
    """A bound decoder, the prepared parameters of its networks, and its knobs (None for the
    defaults).
    """

    decoder: Any
    params: Any
    knobs: Any = None

    def run(self, request: Request, max_steps: int | None = None) -> Decoded:
        """Decodes a request."""
        return run(self.decoder, self.params, request, self.knobs, max_steps=max_steps)


@record
class Speed:
    """What one case took for all requests together.

    Attributes:
      each: seconds of each request, a tuple a pass; a pass is their sum.
      each_reading: seconds that a call needs which stops after the prompt, a tuple a pass.
      compile_seconds: see `compile_all`; small where the program came from a cache on disk.
      decoded: results of the last pass, one a request.
    """

    each: tuple[Seconds, ...]
    each_reading: tuple[Seconds, ...]
    compile_seconds: float
    decoded: tuple[Decoded, ...]

    @property
    def batch(self) -> int:
        """Rows of a request."""
        return self.decoded[0].lengths.shape[0]

    @property
    def generated(self) -> tuple[int, ...]:
        """Generated tokens of each request."""
        return tuple(int(np.asarray(decoded.generated).sum()) for decoded in self.decoded)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(self.generated)

    @property
    def counts(self) -> dict[str, int]:
        """Sums over rows of everything that was counted."""
        return {
            name: sum(int(np.asarray(one.counts[name]).sum()) for one in self.decoded)
            for name in self.decoded[0].counts
        }

    @property
    def calls(self) -> int:
        """Network calls after the prompt was read, of the slowest row of each request, summed."""
        return sum(int(np.asarray(decoded.network_calls).max()) - 1 for decoded in self.decoded)

    @property
    def passes(self) -> tuple[float, ...]:
        """Seconds of each pass."""
        return tuple(map(sum, self.each))

    @property
    def seconds(self) -> float:
        """Median over passes."""
        return statistics.median(self.passes)

    @property
    def init_seconds(self) -> float:
        """Median of the seconds that read the prompts and commit their first tokens."""
        return statistics.median(map(sum, self.each_reading))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over seconds of the median pass, prompts read included."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """As `tokens_per_second`, prompts and the token that each of them predicts left out.

        A difference of two timings: for a few tokens of a tiny model it may be lost in noise, even
        be negative.
        """
        rows = self.batch * len(self.decoded)
        return (self.tokens - rows) / (self.seconds - self.init_seconds)


def measure(
    cases: Sequence[Case],
    requests: Sequence[Request],
    *,
    passes: int = 5,
    advance: Advance = lambda units: None,
) -> list[Speed]:
    """Times cases on the same requests, one call each.

    Every case is compiled and warmed up first. Then each pass goes through the cases in turn, so
    that what else the machine does falls on all alike.

    Args:
      requests: all of one shape, so that a case compiles once; at least one.
      passes: timings of each case, at least one.
      advance: called after each unit of work that is done; there are `len(cases) * (passes + 1)`.
    """
    compiled = compile_all([(case, requests[0]) for case in cases], advance)
    for case in cases:
        _time(case, requests[:1])
    whole: list[list[Seconds]] = [[] for _ in cases]
    reading: list[list[Seconds]] = [[] for _ in cases]
    decoded: list[tuple[Decoded, ...]] = [()] * len(cases)
    for _ in range(passes):
        for i, case in enumerate(cases):
            seconds, decoded[i] = _time(case, requests)
            whole[i].append(seconds)
            reading[i].append(_time(case, requests, max_steps=0)[0])
            advance(1)
    measured = zip(whole, reading, compiled, decoded, strict=True)
    return [
        Speed(tuple(each), tuple(read), first, results) for each, read, first, results in measured
    ]


def compile_all(
    programs: Sequence[tuple[Case, Request]], advance: Advance = lambda units: None
) -> list[float]:
    """Compiles each case for the shape of its request and returns the seconds of each.

    They are those of a first call that stops after the prompt less those of a second one.
    """
    seconds = []
    for case, request in programs:
        first, again = (sum(_time(case, [request], max_steps=0)[0]) for _ in range(2))
        seconds.append(max(first - again, 0.0))
        advance(1)
    return seconds


def planned_bytes(case: Case, request: Request) -> int:
    """Bytes that XLA plans for the program that decodes a request: parameters, temporaries,
    results.
    """
    _, *arrays = checked(case.decoder, case.params, request, case.knobs)
    lowered = compiled_run.lower(case.decoder, case.params, *arrays, np.int32(1))
    plan: Any = lowered.compile().memory_analysis()
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + plan.output_size_in_bytes


def _time(
    case: Case, requests: Sequence[Request], max_steps: int | None = None
) -> tuple[Seconds, tuple[Decoded, ...]]:
    """Seconds and result of each request."""
    seconds, results = [], []
    for request in requests:
        start = time.perf_counter()
        results.append(jax.block_until_ready(case.run(request, max_steps)))
        seconds.append(time.perf_counter() - start)
    return tuple(seconds), tuple(results)
