"""Perplexity at equal entropy: a student beside its teacher at as many steps and a lower
temperature.

::

    perplexity |      o 1.0           a curve of the teacher: one number of steps, one point a temperature
               |    o 0.9
               |   o  x               x a student of fewer steps; what counts is its height over the curve
               |  o 0.7
               +---------------
                 4-gram entropy

A lower temperature lowers perplexity and entropy together, so a perplexity alone proves nothing.
The curve is read at the student's entropy, linear in log-perplexity between its points. Intervals
are 95%, by jackknife over groups of
samples: all rows lose the same group, since sample i has the same key in each, and everything is
  computed anew.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.plots import Lines, draw_lines
from experiments.masked_diffusion.text_measures import jackknife
from paradec_jax.evaluate.intervals import ends

Row = dict[str, Any]
Value = Callable[[int | None], float]
"""A number from rows: of all samples (None), or without one group."""

MOST = 1.05  # perplexity over the teacher's
KEPT = 0.98  # 4-gram entropy over the teacher's, without which perplexities are not compared
CLOSED = 0.4  # share of the teacher's gap


def log_perplexity(row: Row, group: int | None) -> float:
    """Of a row, without a group of its samples."""
    return (
        math.log(row["judge_perplexity"])
        if group is None
        else row["left_out"]["log_perplexity"][group]
    )


def fourgram_entropy(row: Row, group: int | None) -> float:
    """Of a row, without a group of its samples."""
    return row["fourgram_entropy"] if group is None else row["left_out"]["fourgram_entropy"][group]


def with_interval(value: Value, rows: Sequence[Row]) -> tuple[float, list[float | None]]:
    """A number and its 95% interval; its rows must have equally many groups."""
    counts = {len(row["left_out"]["log_perplexity"]) for row in rows}
    if len(counts) != 1:
        raise ValueError(f"rows of {sorted(counts)} groups of samples cannot be compared")
    (groups,) = counts

    def measure(kept: np.ndarray) -> float:
        return value(None if kept.all() else int(np.flatnonzero(~kept)[0]))

    return value(None), ends(jackknife(measure, groups, groups=max(groups, 2)))


def at_entropy(curve: Sequence[Row], entropy: float, group: int | None) -> float:
    """Log-perplexity of a curve at an entropy: linear between its points, beyond its ends as
    between the last two.
    """
    points = sorted((fourgram_entropy(row, group), log_perplexity(row, group)) for row in curve)
    x, y = np.asarray(points).T
    right = int(np.clip(np.searchsorted(x, entropy), 1, len(x) - 1))
    run = x[right] - x[right - 1]
    share = (entropy - x[right - 1]) / run if run > 0 else 0.5
    return float(y[right - 1] + share * (y[right] - y[right - 1]))


def spans(curve: Sequence[Row], row: Row) -> bool:
    """Whether a row's entropy lies between the ends of a curve, so that nothing is extrapolated."""
    known = [fourgram_entropy(point, None) for point in curve]
    return len(curve) > 1 and min(known) <= row["fourgram_entropy"] <= max(known)


def compared(row: Row, curve: Sequence[Row]) -> dict[str, Any]:
    """A row's perplexity over that of a curve at its entropy; None where the curve does not reach
    it.
    """
    told = {
        "line": row["line"],
        "steps": row["steps"],
        "curve": curve[0]["line"],
        "judge_perplexity": row["judge_perplexity"],
        "fourgram_entropy": row["fourgram_entropy"],
    }
    if not spans(curve, row):
        return told | {
            "perplexity_at_equal_entropy": None,
            "ratio": None,
            "ratio_interval": [None, None],
        }

    def ratio(group: int | None) -> float:
        other = at_entropy(curve, fourgram_entropy(row, group), group)
        return math.exp(log_perplexity(row, group) - other)

    value, interval = with_interval(ratio, [row, *curve])
    equal = row["judge_perplexity"] / value
    return told | {"perplexity_at_equal_entropy": equal, "ratio": value, "ratio_interval": interval}


def bars(teacher: Mapping[int, Row], student: Mapping[int, Row]) -> list[dict[str, Any]]:
    """What a last student should reach, from rows by steps at temperature 1; a bar without its rows
    is left out.

    ::

        perplexity   student at 16 and at 8 steps over the teacher at 64
        entropy      the student's 4-gram entropy over the teacher's at 64
        closed       (T_8 - S_8) / (T_8 - T_64), the share of the teacher's gap that the student closes
    """
    found: list[dict[str, Any]] = []

    def add(name: str, steps: int, wanted: str, rows: Sequence[Row], value: Value) -> None:
        number, interval = with_interval(value, rows)
        told = {"bar": name, "steps": steps, "wanted": wanted}
        found.append(
            told | {"value": number if math.isfinite(number) else None, "interval": interval}
        )

    for steps in (16, 8):
        if steps in student and 64 in teacher:
            pair = [student[steps], teacher[64]]
            add(
                "perplexity over the teacher's at 64",
                steps,
                f"at most {MOST}",
                pair,
                _perplexities(*pair),
            )
            add(
                "entropy over the teacher's at 64",
                steps,
                f"at least {KEPT}",
                pair,
                _entropies(*pair),
            )
    if 8 in student and {8, 64} <= teacher.keys():
        rows = [student[8], teacher[64], teacher[8]]
        add(
            "share of the teacher's gap that is closed",
            8,
            f"at least {CLOSED}",
            rows,
            _closed(*rows),
        )
    return found


def _perplexities(one: Row, other: Row) -> Value:
    return lambda group: math.exp(log_perplexity(one, group) - log_perplexity(other, group))


def _entropies(one: Row, other: Row) -> Value:
    return lambda group: fourgram_entropy(one, group) / fourgram_entropy(other, group)


def _closed(student: Row, slow: Row, fast: Row) -> Value:
    def value(group: int | None) -> float:
        mine, least, most = (math.exp(log_perplexity(row, group)) for row in (student, slow, fast))
        return (most - mine) / (most - least) if most != least else math.nan

    return value


def draw(rows: Sequence[Row], path: Path) -> None:
    """Perplexity against 4-gram entropy: a line a curve, in the order of its entropies."""
    lines: dict[str, list[tuple[float, float, list[float]]]] = {}
    for row in sorted(rows, key=lambda row: row["fourgram_entropy"]):
        interval = [end if end is not None else row["judge_perplexity"] for end in row["interval"]]
        point = row["fourgram_entropy"], row["judge_perplexity"], interval
        lines.setdefault(row["line"], []).append(point)
    ordered: Lines = {name: lines[name] for name in dict.fromkeys(row["line"] for row in rows)}
    draw_lines(
        ordered, path, x="4-gram entropy (nats)", y="perplexity under the judge", log_x=False
    )
