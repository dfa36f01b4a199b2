"""What README.md and the papers' RESULTS.md claim about speed, and whether it holds in what was measured here."""

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
    """A row of a part that compares decoders: a model, a decoder and some of its settings."""

    model: str
    decoder: str
    choices: Mapping[str, Any] = {}
    part: str = "compare"

    def find(self, results: Results, batch: int) -> Mapping[str, Any] | None:
        """The row at a batch size, None where it was not measured."""
        if self.part not in results:
            return None
        rows = rows_of(results[self.part], model=self.model, decoder=self.decoder, batch=batch)
        fitting = [
            row
            for row in rows
            if all(row["settings"].get(name) == value for name, value in self.choices.items())
        ]
        return fitting[0] if fitting else None


def ratio(first: Row, *others: Row, batch: int = 1) -> Callable[[Results], Figure | None]:
    """Tokens per second of one row over those of another, or of the fastest of several; the first must be there."""

    def figure(results: Results) -> Figure | None:
        a, *found = [row.find(results, batch) for row in (first, *others)]
        if a is None or found[0] is None:
            return None
        b = max((row for row in found if row is not None), key=lambda row: row["tokens_per_second"])
        passes = min(len(a["each"]), len(b["each"]))
        value, interval = speedup(a["generated"], a["each"][:passes], b["generated"], b["each"][:passes])
        return Figure(value, *interval)

    return figure


def fastest(model: str) -> Callable[[Results], Figure | None]:
    """The highest speed over the model's baseline at batch 1 of all its decoders; the range is that of this one."""

    def figure(results: Results) -> Figure | None:
        rows = rows_of(results.get("compare", {"rows": []}), model=model, batch=1, baseline=False)
        if not rows:
            return None
        best = max(rows, key=lambda row: row["speedup"])
        return Figure(best["speedup"], *best["speedup_range"])

    return figure


def field(part: str, name: str, /, **choices: Any) -> Callable[[Results], Figure | None]:
    """A field of a row of another part, with the field of its range."""

    def figure(results: Results) -> Figure | None:
        rows = rows_of(results.get(part, {"rows": []}), **choices)
        return Figure(rows[0][name], *rows[0][f"{name}_range"]) if rows else None

    return figure


DISTILLED, CAUSAL, JACOBI = "tiny-recurrent-distilled", "tiny-causal", "tiny-jacobi"
SHALLOW = Row(DISTILLED, "autoregressive", {"recurrence": 1})
DEEP = Row(DISTILLED, "autoregressive", {"recurrence": 16})
FORGETTING = Row(DISTILLED, "wavefront", {"window": 8, "warm_start": False})
WAVE = Row(DISTILLED, "wavefront", {"window": 2})
PLAIN = Row(DISTILLED, "jacobi", {"block": 8, "running": True})
ONE_BY_ONE = Row(JACOBI, "autoregressive")
RUNNING = {"running": True, "candidates": None}
RUNNING_8 = Row(JACOBI, "jacobi", {"block": 8, **RUNNING})
RUNNING_16 = Row(JACOBI, "jacobi", {"block": 16, **RUNNING})
BLOCK = Row(JACOBI, "jacobi", {"block": 16, "running": False, "pool": 0})
WIDE = "wide-pointers"
WHOLE = Row(WIDE, "wavefront", {"window": 65, "warm_start": True}, "pointers")
WHOLE_JACOBI = Row(WIDE, "wavefront", {"window": 65, "warm_start": False}, "pointers")
SEQUENTIAL = (
    Row(WIDE, "autoregressive", {}, "pointers"),
    Row(WIDE, "adaptive", {"exit_threshold": 0.4}, "pointers"),
    Row(WIDE, "adaptive", {"exit_threshold": 0.8}, "pointers"),
)
README = "README.md"
RECURRENT, CAUSAL_MODELS = "experiments/recurrent_depth/RESULTS.md", "experiments/jacobi/RESULTS.md"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "forgetting wave / r = 16",
        "tiny-recurrent-distilled: a wave that forgets its states (Jacobi decoding) is 11.7 times as fast as r = 16.",
        RECURRENT,
        ratio(FORGETTING, DEEP),
        least=11.7,
    ),
    Claim(
        "forgetting wave / r = 1",
        "tiny-recurrent-distilled: that wave is 1.5 times as fast as r = 1, its best sequential rival.",
        README,
        ratio(FORGETTING, SHALLOW),
        least=1.5,
    ),
    Claim(
        "forgetting wave faster",
        "tiny-recurrent-distilled: that wave is faster than r = 1 at all.",
        README,
        ratio(FORGETTING, SHALLOW),
        least=1.0,
    ),
    Claim(
        "r = 1 / r = 16",
        "tiny-recurrent-distilled: one recurrence a token is 7.6 times as fast as sixteen.",
        RECURRENT,
        ratio(SHALLOW, DEEP),
        least=7.6,
    ),
    Claim(
        "paper's wave / r = 1",
        "tiny-recurrent-distilled: a wave that commits one token a step gains wasted recurrences alone, so it is no "
        "faster than r = 1.",
        README,
        ratio(WAVE, SHALLOW),
        most=1.0,
    ),
    Claim(
        "paper's wave / r = 16",
        "tiny-recurrent-distilled: a wave of window 2 is 5.29 times as fast as r = 16.",
        RECURRENT,
        ratio(WAVE, DEEP),
        least=5.29,
    ),
    Claim(
        "plain Jacobi / forgetting wave",
        "tiny-recurrent-distilled: plain Jacobi decoding at r = 1 is not slower than the wave that forgets.",
        RECURRENT,
        ratio(PLAIN, FORGETTING),
        least=1.0,
    ),
    *(
        Claim(
            f"forgetting wave, batch {batch}",
            f"tiny-recurrent-distilled: at batch {batch} the wave that forgets loses to r = 1.",
            RECURRENT,
            ratio(FORGETTING, SHALLOW, batch=batch),
            most=1.0,
        )
        for batch in (4, 16)
    ),
    Claim(
        "running window 8",
        "tiny-jacobi: a running window of 8 is 1.4 times as fast as one by one.",
        CAUSAL_MODELS,
        ratio(RUNNING_8, ONE_BY_ONE),
        least=1.4,
    ),
    Claim(
        "running window 16",
        "tiny-jacobi: a running window of 16 is 1.3 times as fast as one by one.",
        CAUSAL_MODELS,
        ratio(RUNNING_16, ONE_BY_ONE),
        least=1.3,
    ),
    Claim(
        "blocks of 16",
        "tiny-jacobi: block Jacobi decoding, n = 16, is 1.1 times as fast as one by one.",
        CAUSAL_MODELS,
        ratio(BLOCK, ONE_BY_ONE),
        least=1.1,
    ),
    *(
        Claim(
            name.replace("_", " "),
            f"tiny-jacobi: {name.replace('_', ' ')} decoding is slower than one by one.",
            CAUSAL_MODELS,
            ratio(Row(JACOBI, name), ONE_BY_ONE),
            most=1.0,
        )
        for name in ("prompt_lookup", "lookahead")
    ),
    Claim(
        "undistilled",
        "tiny-causal: before distillation every parallel decoder is slower than one by one.",
        CAUSAL_MODELS,
        fastest(CAUSAL),
        most=1.0,
    ),
    Claim(
        "causal / recurrent",
        "tiny-jacobi with a running window of 8 is faster than the wave that forgets on tiny-recurrent-distilled.",
        CAUSAL_MODELS,
        ratio(RUNNING_8, FORGETTING),
        least=1.0,
    ),
    Claim(
        "wave that holds an answer",
        "wide-pointers: a wave that holds the answer is 3.5 times as fast as the best sequential rival.",
        RECURRENT,
        ratio(WHOLE, *SEQUENTIAL),
        least=3.5,
    ),
    Claim(
        "carried states",
        "wide-pointers: that wave is 1.2 times as fast as Jacobi decoding at r = 12.",
        RECURRENT,
        ratio(WHOLE, WHOLE_JACOBI),
        least=1.2,
    ),
    Claim(
        "paced wave, tiny",
        "tiny-recurrent's shape: a wave as wide as sixteen recurrences is 1.4 times as fast as r = 16.",
        RECURRENT,
        field("wave", "speedup", shape="tiny-recurrent", name="wave, r' = 1"),
        least=1.4,
    ),
    Claim(
        "eight positions",
        "tiny-causal's shape: a call over 8 positions costs 2.1 times one over one position.",
        CAUSAL_MODELS,
        field("calls", "needed", shape="tiny-causal", window=8),
        most=2.1,
    ),
    Claim(
        "sixteen positions",
        "tiny-causal's shape: a call over 16 positions costs 3.2 times one over one position.",
        CAUSAL_MODELS,
        field("calls", "needed", shape="tiny-causal", window=16),
        most=3.2,
    ),
    Claim(
        "joined matrices",
        "tiny-causal's shape: a step with separate matrices takes 1.05 times as long as with joined ones.",
        "paradec_jax/models/prepare.py",
        field("layouts", "slowdown", shape="tiny-causal", choice="matrices", side="separate", window=1),
        least=1.05,
    ),
)
