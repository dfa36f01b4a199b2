"""Models between a teacher and its last student, without another training: weights on the line between both.

`python -m experiments.masked_diffusion.between --text FILE`. A share of 0 is the teacher, 1 the student::

    w = (1 - share) teacher + share student

Rounds of distillation move weights little by little and trade the variety of texts for few steps; where the last one
went farther than the steps at which it is used, a point before it may serve better (as Wortsman et al. 2022, arXiv
2109.01903, find for models that were tuned to a task). Each share is drawn at temperature 1, and compared with the
teacher at as many steps and the temperature at which it is as varied. Rows that were drawn stay in RUNS/drawn.json.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.masked_diffusion import frontier
from experiments.masked_diffusion.study import masked
from experiments.masked_diffusion.texts import REAL, Drawing, Line, Row, Texts
from paradec_jax import load, store
from paradec_jax.disk.description import counting
from paradec_jax.evaluate.intervals import times


@dataclasses.dataclass(frozen=True)
class Options:
    """What to draw.

    Attributes:
      teacher: model folder, or name of a bundled model.
      student: the same of its last student.
      judge: the same of a model that predicts the next token.
      text: the file that they were trained on, whose held-out part is the real text.
      shares: of the way from teacher to student.
      steps: of the samplers.
      most: steps that the teacher is drawn at beside, for the bars; not drawn when None.
      temperatures: of the teacher.
      samples: texts of a row.
      length: tokens of a text; as long as the teacher when None.
      rows: texts drawn together.
      seed: of all draws.
      runs: where models and rows lie.
      out: where the JSON goes.
      figure: where the picture goes.
    """

    teacher: str = "tiny-mdlm"
    student: str = "tiny-mdlm-distilled"
    judge: str = "tiny-judge"
    text: Path | None = None
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    steps: tuple[int, ...] = (8, 16)
    most: int | None = None
    temperatures: tuple[float, ...] = (1.0, 0.9, 0.8)
    samples: int = 128
    length: int | None = None
    rows: int = 64
    seed: int = 0
    runs: Path = Path("runs/between")
    out: Path = Path("experiments/masked_diffusion/results/between.json")
    figure: Path = Path("experiments/masked_diffusion/figures/between.png")

    def __post_init__(self) -> None:
        if not (self.shares and self.steps and self.temperatures):
            raise ValueError("shares, steps and temperatures need at least one number each")
        if not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares must be above 0 and at most 1, not {self.shares}")
        if 1 not in self.temperatures:
            raise ValueError(f"temperatures must have 1, not {self.temperatures} alone")


def between(options: Options) -> dict[float, str]:
    """The model folder of each share, written where it is missing.

    Raises:
      ValueError: models of two shapes or tokenizers.
    """
    teacher, student = (load(place, dtype="float32") for place in (options.teacher, options.student))
    shapes = [(model.family, counting(model.config)) for model in (teacher, student)]
    tokenizers = [model.tokenizer and model.tokenizer.digest() for model in (teacher, student)]
    for what, (one, other) in (("shape", shapes), ("tokenizer", tokenizers)):
        if one != other:
            raise ValueError(
                f"{options.teacher} and {options.student} differ in {what}: give a teacher and its student"
            )
    found = {}
    names = "-".join(store.fingerprint(place)[:8] for place in (options.teacher, options.student))
    for share in options.shares:
        folder = options.runs / f"{names}-{share:g}" / "model"
        if not folder.exists():
            params: Any = jax.tree.map(
                lambda a, b, share=share: np.asarray(np.float32(1 - share) * a + np.float32(share) * b),
                teacher.params,
                student.params,
            )
            store.save(folder, dataclasses.replace(teacher, params=params))
        found[share] = str(folder)
    return found


def _name(share: float) -> str:
    return f"share {share:g}"


def lines_of(options: Options) -> list[Line]:
    """The teacher's curves over temperature, and every share at temperature 1."""
    lines = [
        Line(f"teacher, {steps} steps", options.teacher, masked(steps, temperature=temperature))
        for steps in options.steps
        for temperature in options.temperatures
    ]
    if options.most is not None:
        lines.append(Line(f"teacher, {options.most} steps", options.teacher, masked(options.most)))
    return lines + [
        Line(_name(share), place, masked(steps))
        for share, place in between(options).items()
        for steps in options.steps
    ]


def compared(rows: Sequence[Row], options: Options) -> dict[str, list[dict[str, Any]]]:
    """Each share over the teacher's curve at as many steps, and its bars."""
    curves = {
        steps: [row for row in rows if row["line"] == f"teacher, {steps} steps"] for steps in options.steps
    }
    most = [row for row in rows if row["line"] == f"teacher, {options.most} steps"]
    at_one = {
        row["steps"]: row for curve in (*curves.values(), most) for row in curve if row["temperature"] == 1
    }
    equal, bars = [], []
    for share in options.shares:
        mine = {row["steps"]: row for row in rows if row["line"] == _name(share)}
        equal += [{"share": share} | frontier.compared(row, curves[steps]) for steps, row in mine.items()]
        bars += [{"share": share} | bar for bar in frontier.bars(at_one, mine)]
    return {"at_equal_entropy": equal, "bars": bars}


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Draws what is missing, compares, prints, writes and draws the rows."""
    length = load(options.teacher).network.max_length if options.length is None else options.length
    drawing = Drawing(
        file=options.runs / "drawn.json",
        model=options.teacher,
        judge=options.judge,
        text=options.text,
        samples=options.samples,
        length=length,
        rows=options.rows,
        seed=options.seed,
    )
    texts = Texts(drawing)
    rows = texts.of(lines_of(options), "Between teacher and student")
    more = compared(rows, options)
    shares = {_name(share): share for share in options.shares} | {REAL: None}
    told = [
        {k: v for k, v in row.items() if k != "left_out"} | {"share": shares.get(row["line"], 0.0)}
        for row in rows
    ]
    dtypes = [dtype for row in rows for dtype in row["dtypes"]]
    shown = dataclasses.asdict(options) | texts.kept
    write_record(options.out, shown, {"rows": told, **more}, dtypes=dtypes)
    try:
        frontier.draw(rows, options.figure)
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')", file=sys.stderr)
    for row in told:
        print(
            f"{row['label']:44s} perplexity {row['judge_perplexity']:8.3f}  "
            f"4-gram entropy {row['fourgram_entropy']:7.4f}"
        )
    for one in more["at_equal_entropy"]:
        ratio = "beyond the curve" if one["ratio"] is None else times(one["ratio"], one["ratio_interval"])
        print(
            f"share {one['share']:g}, {one['steps']} steps, over the tempered teacher at equal entropy: {ratio}"
        )
    for one in more["bars"]:
        value = "none" if one["value"] is None else times(one["value"], one["interval"])
        print(f"share {one['share']:g}, {one['steps']} steps: {one['bar']} {value}, wanted {one['wanted']}")


if __name__ == "__main__":
    run(main)
