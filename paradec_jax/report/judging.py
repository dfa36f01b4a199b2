"""What a claim about speed is, and whether it holds in what was measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paradec_jax.report.parts import rows_of
from paradec_jax.report.timing import speedup

HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "open", "not measured"
Results = Mapping[str, Mapping[str, Any]]  # results of parts by name


class Figure(NamedTuple):
    """A measured value and its range."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A sentence that a figure can refute.

    Attributes:
      name: short, for tables.
      sentence: what is claimed.
      source: the page that says so.
      where: the processor that it was measured on.
      figure: the figure in the results of the parts, None where they do not have it.
      least, most: bounds of the claim; None for no bound.
    """

    name: str
    sentence: str
    source: str
    where: str
    figure: Callable[[Results], Figure | None]
    least: float | None = None
    most: float | None = None

    def verdict(self, figure: Figure | None) -> str:
        """Holds where the whole range lies inside the bounds, does not where all of it lies outside, else open."""
        if figure is None:
            return MISSING
        low = -np.inf if self.least is None else self.least
        high = np.inf if self.most is None else self.most
        if low <= figure.low and figure.high <= high:
            return HOLDS
        return FAILS if figure.high < low or figure.low > high else OPEN


def judged(claims: Sequence[Claim], results: Results) -> list[dict[str, Any]]:
    """Every claim with its figure here and its verdict, as JSON values."""
    found = []
    for claim in claims:
        figure = claim.figure(results)
        found.append(
            {
                "name": claim.name,
                "sentence": claim.sentence,
                "source": claim.source,
                "where": claim.where,
                "least": claim.least,
                "most": claim.most,
                "figure": None if figure is None else figure.value,
                "range": None if figure is None else [figure.low, figure.high],
                "verdict": claim.verdict(figure),
            }
        )
    return found


class Row(NamedTuple):
    """A row of a part that compares decoders: a model, a decoder and some of its settings."""

    model: str
    decoder: str
    choices: Mapping[str, Any] = {}
    part: str = "compare"

    def fits(self, decoder: str, settings: Mapping[str, Any]) -> bool:
        """Whether a decoder with these settings is the one."""
        same = all(settings.get(name) == value for name, value in self.choices.items())
        return decoder == self.decoder and same

    def find(self, results: Results, batch: int) -> Mapping[str, Any] | None:
        """The row at a batch size, None where it was not measured."""
        rows = rows_of(results.get(self.part, {"rows": []}), model=self.model, batch=batch)
        return next((row for row in rows if self.fits(row["decoder"], row["settings"])), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Ratio:
    """Tokens a second of the fastest of some rows over those of the fastest of others; None where one is missing.

    Whichever is the fastest may be so by chance. So the ends of the range are those of the ratio of the fastest too:
    the highest lower end and the highest upper end of all ratios above, the lowest ones below.
    """

    above: Sequence[Row]
    below: Sequence[Row]
    batch: int = 1

    def __call__(self, results: Results) -> Figure | None:
        """The figure in the results of the parts."""
        above, below = ([row.find(results, self.batch) for row in rows] for rows in (self.above, self.below))
        if None in above or None in below:
            return None
        found = [[_over(a, b) for b in below] for a in above]
        least = [Figure(*map(min, zip(*of, strict=True))) for of in found]
        return Figure(*map(max, zip(*least, strict=True)))


def _over(a: Any, b: Any) -> Figure:
    passes = min(len(a["each"]), len(b["each"]))
    value, interval = speedup(a["generated"], a["each"][:passes], b["generated"], b["each"][:passes])
    return Figure(value, *interval)


def ratio(first: Row, *others: Row, batch: int = 1) -> Ratio:
    """Tokens a second of one row over those of another, or of the fastest of several."""
    return Ratio((first,), others, batch)


def wanted(claims: Sequence[Claim], part: str, model: str, batch: int) -> list[Row]:
    """The rows of a part that claims are about, for one model at one batch size."""
    ratios = [claim.figure for claim in claims if isinstance(claim.figure, Ratio)]
    rows = [row for of in ratios if of.batch == batch for row in (*of.above, *of.below)]
    return [row for row in rows if (row.part, row.model) == (part, model)]


def field(part: str, name: str, /, **choices: Any) -> Callable[[Results], Figure | None]:
    """A field of a row of another part, with the field of its range."""

    def figure(results: Results) -> Figure | None:
        rows = rows_of(results.get(part, {"rows": []}), **choices)
        return Figure(rows[0][name], *rows[0][f"{name}_range"]) if rows else None

    return figure
