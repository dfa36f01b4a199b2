"""Uncertainty of shares (Wilson), of paired differences on the same problems, of ratios of sums."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

Numbers = Sequence[Any] | np.ndarray  # [N], or [passes, N]
Z95 = 1.959963984540054  # 97.5% of a normal distribution lie below it
RESAMPLES = 2000  # of a bootstrap, always from the same seed


class Paired(NamedTuple):
    """Two methods on the same problems.

    Attributes:
      difference: share right of the first minus that of the second.
      interval: its 95% interval.
      only_first, only_second: problems that one of them alone got right.
      p_value: exact two-sided McNemar test of no difference.
    """

    difference: float
    interval: tuple[float, float]
    only_first: int
    only_second: int
    p_value: float


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share, `(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 +
    z^2/n)`.
    """
    interval = _binomial_test(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def paired(first: Bool[np.ndarray, "..."], second: Bool[np.ndarray, "..."]) -> Paired:
    """Difference of two methods from which of the same problems each got right.

    The interval is Wald's with half a problem added to each of the four cells (Agresti and Min,
    2005), so that it keeps a width where the methods never differ.
    """
    first, second = (x > 0 for x in _vectors(first, second))
    count = first.size
    b, c = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    padded = count + 2
    centre = (b - c) / padded
    spread = Z95 * math.sqrt((b + c + 1) / padded - centre * centre) / math.sqrt(padded)
    interval = (max(centre - spread, -1.0), min(centre + spread, 1.0))
    p_value = float(_binomial_test(b, b + c).pvalue) if b + c else 1.0
    return Paired((b - c) / count, interval, b, c, p_value)


def ratio(above: Numbers, below: Numbers) -> tuple[float, float]:
    """Interval of `R = sum a / sum b` over N independent problems, by the delta method:

        R -+ z sqrt(N / (N - 1) * sum (a_i - R b_i)^2) / sum b

    A single problem tells nothing of the spread: its interval is the whole half line.
    """
    a, b = _vectors(above, below)
    if b.sum() <= 0:
        raise ValueError(f"the sum of the second vector must be above 0, not {b.sum()}")
    if a.size == 1:
        return 0.0, math.inf
    centre = a.sum() / b.sum()
    spread = Z95 * math.sqrt(a.size / (a.size - 1) * np.sum((a - centre * b) ** 2)) / b.sum()
    return float(max(centre - spread, 0.0)), float(centre + spread)


def speedup(
    tokens: Numbers,
    seconds: Numbers,
    base_tokens: Numbers,
    base_seconds: Numbers,
    *,
    less: Numbers | None = None,
    base_less: Numbers | None = None,
) -> tuple[float, tuple[float, float]]:
    """Speed of one decoder over another's, and its 95% range by bootstrap over calls and passes.

        R = (sum_i a_i / median_p sum_i s_pi) / (sum_i b_i / median_p sum_i t_pi)

    A resample draws the N calls and the passes anew, each with replacement and alike for both
    decoders, which were timed in turns. A single call or a single pass shows no spread of its own:
    the range is then too narrow.

    Args:
      tokens, seconds: [N] and [passes, N] of the one decoder.
      base_tokens, base_seconds: [N] and [passes, N] of the other decoder.
      less, base_less: [passes, N], seconds whose own median is taken away from that of `seconds`;
        where a resample leaves nothing above 0, the spread has no end, and the range is (0,
        infinity).

    Raises:
      ValueError: other shapes, nothing measured, or seconds that are not above 0.
    """
    given = tokens, base_tokens, seconds, base_seconds
    a, b, s, t = (np.asarray(x, np.float64) for x in given)
    fits = a.shape == b.shape == s.shape[1:] and s.shape == t.shape
    if not fits or not s.size or min(s.min(), t.min()) <= 0:
        raise ValueError(
            f"need tokens [N] and seconds [passes, N] above 0 of both, not {a.shape}, {s.shape}, {b.shape}, {t.shape}"
        )
    u, v = (np.zeros_like(s) if x is None else np.asarray(x, np.float64) for x in (less, base_less))
    passes, calls = s.shape
    draw = np.random.default_rng(0)
    columns = draw.integers(0, calls, (RESAMPLES, 1, calls))
    rows = draw.integers(0, passes, (RESAMPLES, passes, 1))

    def spent(seconds: np.ndarray, less: np.ndarray) -> Any:
        return np.median(seconds.sum(-1), axis=-1) - np.median(less.sum(-1), axis=-1)

    one = spent(s[rows, columns], u[rows, columns])
    other = spent(t[rows, columns], v[rows, columns])
    value = float(a.sum() / b.sum() * spent(t, v) / spent(s, u))
    ours, theirs = (x[columns[:, 0]].sum(-1) for x in (a, b))
    if min(one.min(), other.min(), theirs.min()) <= 0:
        return value, (0.0, math.inf)
    low, high = np.percentile(ours / theirs * other / one, (2.5, 97.5))
    return value, (float(low), float(high))


def ends(interval: Sequence[float]) -> list[float | None]:
    """The ends of an interval as JSON values, None of one that is infinite."""
    return [float(end) if math.isfinite(end) else None for end in interval]


def bootstrap(above: Numbers, below: Numbers | None = None) -> tuple[float, float]:
    """95% range of `sum a / sum b` over N independent samples, by bootstrap over them; of the mean
    of a without b.

    A resample draws N samples with replacement; the ends are percentiles of the ratio. A resample
    without anything below leaves no end: the range is then the whole line, as it is for a single
    sample.
    """
    a, b = _vectors(above, np.ones_like(above, np.float64) if below is None else below)
    # How often each sample is drawn, instead of which ones: two products give all resamples.
    times = np.random.default_rng(0).multinomial(a.size, np.full(a.size, 1 / a.size), RESAMPLES)
    drawn = times @ b
    if a.size == 1 or drawn.min() <= 0:
        return -math.inf, math.inf
    low, high = np.percentile(times @ a / drawn, (2.5, 97.5))
    return float(low), float(high)


def _vectors(above: Numbers, below: Numbers) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"need two vectors of one length, at least 1, not {a.shape} and {b.shape}")
    return a, b


def _binomial_test(successes: int, trials: int) -> Any:
    """SciPy's two-sided test of a share of one half."""
    from scipy.stats import binomtest  # here, because it takes long and decoding alone needs none

    return binomtest(successes, trials)
