"""How fast decoders are: several of them, timed in turns in one process, compilation kept apart."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paradec_jax.decode import Decoded, Request, run

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A bound decoder and its knobs (None for the defaults).

    Attributes:
      decoder, knobs: see above.
      params: prepared parameters of its own, where it takes others than the rest; None for those of all.
    """

    decoder: Any
    knobs: Any = None
    params: Any = dataclasses.field(default=None, compare=False)

    def parameters(self, params: Any) -> Any:
        """Its own, or those of all."""
        return params if self.params is None else self.params


@dataclasses.dataclass(frozen=True, eq=False)
class Speed:
    """What one case took for all requests together.

    Attributes:
      batch: rows of a call.
      tokens: tokens generated.
      calls: network calls after the prompt was read, of the slowest row of each request, summed.
      seconds: median over passes.
      init_seconds: median of the share that reads the prompts and commits their first tokens.
      passes: seconds of each pass.
      each: seconds of each request, a tuple a pass; a pass is their sum.
      each_reading: as `each`, of the reading of the prompts.
      quickest: seconds of the quickest pass less those of the quickest reading of the prompts, which other work
        on the machine disturbs least.
      compile_seconds: see `compile_all`; small where the program came from a cache on disk.
      counts: sums over rows of everything that was counted.
      step_counts: those of the loop alone, prompts left out.
      decoded: results of the last pass, one a request.
    """

    batch: int
    tokens: int
    calls: int
    seconds: float
    init_seconds: float
    passes: tuple[float, ...]
    each: tuple[tuple[float, ...], ...]
    each_reading: tuple[tuple[float, ...], ...]
    quickest: float
    compile_seconds: float
    counts: dict[str, int]
    step_counts: dict[str, int]
    decoded: tuple[Decoded, ...]

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens generated of each request."""
        return tuple(int(np.asarray(decoded.generated).sum()) for decoded in self.decoded)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over seconds of the median pass, prompts read included."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """As `tokens_per_second`, prompts and the token that each of them predicts left out.

        A difference of two timings: for a few tokens of a tiny model it may be lost in noise, even be negative.
        """
        rows = sum(len(decoded.generated) for decoded in self.decoded)
        return (self.tokens - rows) / (self.seconds - self.init_seconds)


def measure(
    cases: Sequence[Case],
    params: Any,
    requests: Sequence[Request],
    *,
    passes: int = 5,
    advance: Advance = lambda units: None,
    enough: Callable[[], bool] = lambda: False,
) -> list[Speed]:
    """Times cases on the same requests, one call each.

    Every case is compiled and warmed up first. Then each pass goes through the cases in turn, so that
    what else the machine does falls on all alike.

    Args:
      cases: what to time.
      params: parameters of their networks, prepared.
      requests: all of one shape, so that a case compiles once.
      passes: timings of each case.
      advance: told after each unit of work that it is done; there are `len(cases) * (passes + 1)`.
      enough: asked after each pass; true ends the measurement with fewer of them.

    Raises:
      ValueError: no request, requests of several shapes, or no pass.
    """
    shapes = {request.tokens.shape for request in requests}
    if len(shapes) != 1 or passes < 1:
        raise ValueError(f"need requests of one shape and a pass or more, not {sorted(shapes)} and {passes}")
    compiled = compile_all([(case, requests[0]) for case in cases], params, advance=advance)
    for case in cases:
        _time(case, params, requests[:1], None)
    full: list[list[tuple[float, ...]]] = [[] for _ in cases]
    short: list[list[tuple[float, ...]]] = [[] for _ in cases]
    results: list[tuple[Decoded, ...]] = [()] * len(cases)
    prompts: list[tuple[Decoded, ...]] = [()] * len(cases)
    for _ in range(passes):
        for i, case in enumerate(cases):
            each, results[i] = _time(case, params, requests, None)
            read, prompts[i] = _time(case, params, requests, 0)
            full[i].append(each)
            short[i].append(read)
            advance(1)
        if enough():
            break
    batch = requests[0].batch
    return [_speed(batch, results[i], prompts[i], full[i], short[i], compiled[i]) for i in range(len(cases))]


def compile_all(
    programs: Sequence[tuple[Case, Request]],
    params: Any,
    *,
    advance: Advance = lambda units: None,
) -> list[float]:
    """Compiles each case for the shape of its request and returns the seconds of each.

    They are those of a first call that stops after the prompt less those of a second one.

    Args:
      programs: cases and requests.
      params: parameters of their networks.
      advance: told after each program that it is done.
    """
    seconds = []
    for case, request in programs:
        first, _ = _time(case, params, [request], 0)
        again, _ = _time(case, params, [request], 0)
        seconds.append(max(sum(first) - sum(again), 0.0))
        advance(1)
    return seconds


def _time(
    case: Case, params: Any, requests: Sequence[Request], max_steps: int | None
) -> tuple[tuple[float, ...], tuple[Decoded, ...]]:
    seconds, results = [], []
    for request in requests:
        start = time.perf_counter()
        decoded = run(case.decoder, case.parameters(params), request, case.knobs, max_steps=max_steps)
        results.append(jax.block_until_ready(decoded))
        seconds.append(time.perf_counter() - start)
    return tuple(seconds), tuple(results)


def _totals(results: tuple[Decoded, ...]) -> dict[str, int]:
    names = results[0].counts
    return {name: int(sum(np.asarray(decoded.counts[name]).sum() for decoded in results)) for name in names}


def _speed(
    batch: int,
    results: tuple[Decoded, ...],
    prompts: tuple[Decoded, ...],
    each: list[tuple[float, ...]],
    each_reading: list[tuple[float, ...]],
    compile_seconds: float,
) -> Speed:
    passes, reading = (tuple(map(sum, seconds)) for seconds in (each, each_reading))
    counts, of_prompts = _totals(results), _totals(prompts)
    generated = [np.asarray(decoded.generated) for decoded in results]
    calls = [np.asarray(decoded.network_calls) for decoded in results]
    return Speed(
        batch=batch,
        tokens=int(sum(row.sum() for row in generated)),
        calls=int(sum(row.max() - 1 for row in calls)),
        seconds=statistics.median(passes),
        init_seconds=statistics.median(reading),
        passes=passes,
        each=tuple(each),
        each_reading=tuple(each_reading),
        quickest=min(passes) - min(reading),
        compile_seconds=compile_seconds,
        counts=counts,
        step_counts={name: total - of_prompts[name] for name, total in counts.items()},
        decoded=results,
    )
