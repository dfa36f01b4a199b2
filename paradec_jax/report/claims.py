"""What README.md and experiments/RESULTS.md claim about speed, and whether it holds in what was measured here."""

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
      source: where.
      figure: the figure in the results of the parts, None where they do not have it.
      least, most: bounds of the claim; None for no bound.
    """

    name: str
    sentence: str
    source: str
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
                "least": claim.least,
                "most": claim.most,
                "figure": None if figure is None else figure.value,
                "range": None if figure is None else [figure.low, figure.high],
                "verdict": claim.verdict(figure),
            }
        )
    return found


class Row(NamedTuple):
    """A row of the part `compare`: a model, a decoder and some of its settings."""

    model: str
    decoder: str
    choices: Mapping[str, Any] = {}

    def find(self, results: Results, batch: int) -> Mapping[str, Any] | None:
        """The row at a batch size, None where it was not measured."""
        if "compare" not in results:
            return None
        rows = rows_of(results["compare"], model=self.model, decoder=self.decoder, batch=batch)
        fitting = [
            row
            for row in rows
            if all(row["settings"].get(name) == value for name, value in self.choices.items())
        ]
        return fitting[0] if fitting else None


def ratio(first: Row, second: Row, batch: int = 1) -> Callable[[Results], Figure | None]:
    """Tokens per second of one row over those of another, both at one batch size."""

    def figure(results: Results) -> Figure | None:
        a, b = first.find(results, batch), second.find(results, batch)
        if a is None or b is None:
            return None
        passes = min(len(a["each"]), len(b["each"]))
        value, interval = speedup(a["generated"], a["each"][:passes], b["generated"], b["each"][:passes])
        return Figure(value, *interval)

    return figure


DISTILLED = "tiny-recurrent-distilled"
SHALLOW = Row(DISTILLED, "autoregressive", {"recurrence": 1})
DEEP = Row(DISTILLED, "autoregressive", {"recurrence": 16})
FORGETTING = Row(DISTILLED, "wavefront", {"window": 8, "warm_start": False})
WAVE = Row(DISTILLED, "wavefront", {"window": 2})
README, RESULTS = "README.md", "experiments/RESULTS.md"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "one recurrence, r = 16",
        "On tiny-recurrent-distilled one recurrence a token is several times as fast as sixteen.",
        README,
        ratio(SHALLOW, DEEP),
        least=3,
    ),
)
