"""The studies of masked diffusion: `python -m experiments.masked_diffusion.study rounds frontier
--text FILE`.

What SDTT (Deschenaux and Gulcehre 2024, arXiv 2410.21035) shows of its students, and the teacher at
as many steps and a lower temperature beside them. Models are folders of trainings
(`recipes/masked.sh`, `sdtt.sh`), or any others:

    python -m experiments.masked_diffusion.study rounds --teacher DIR --students DIR DIR --judge DIR

Each study writes JSON, with a row a model, sampler and number of steps, and a picture.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels, if_possible
from experiments.common.ratios import times
from experiments.common.record import write_record
from experiments.masked_diffusion import frontier
from experiments.masked_diffusion.texts import Drawing, Line, Row, Texts
from experiments.replicas import ReleasedMasked
from paradec_jax import AutoRegressive, Masked, load
from paradec_jax.decode.machine.setting import Setting

PERPLEXITY = "perplexity under the judge"
PANELS = {
    PERPLEXITY: ("judge_perplexity", "interval"),
    "4-gram entropy (nats)": ("fourgram_entropy", "fourgram_entropy_interval"),
    "self-BLEU": ("self_bleu", None),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to study.

    Attributes:
      study: names of studies; "all" for every one.
      teacher: model folder, or name of a bundled model; RUNS/tiny-mdlm/model when None.
      students: models of the rounds, in their order; those of RUNS/halves when empty.
      judge: a model that predicts the next token; RUNS/tiny-judge/model when None.
      rival: a model that predicts the next token, drawn beside the others; RUNS/tiny-rival/model,
        where it exists, when None.
      runs: folder of the runs.
      text: the file that the models were trained on, whose held-out part is the real text.
      steps: steps of the samplers.
      frontier: steps of the teacher's curves, and of the students all but the most.
      temperatures: temperatures of the teacher's curves and of the rival's.
      most_temperatures: temperatures of the teacher's curve of most steps, the longest;
        `temperatures` when None.
      samples: texts of a row.
      length: tokens of a text; as long as the teacher when None.
      rows: texts drawn together.
      seed: of all draws.
      drawn: where all rows are kept that were ever drawn; RUNS/drawn.json when None.
      folder: where the results go; pictures go to `figures` beside it.
    """

    study: tyro.conf.Positional[tuple[str, ...]]
    teacher: str | None = None
    students: tuple[str, ...] = ()
    judge: str | None = None
    rival: str | None = None
    runs: Path = Path("runs")
    text: Path | None = None
    steps: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    frontier: tuple[int, ...] = (4, 8, 16, 64)
    temperatures: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
    most_temperatures: tuple[float, ...] | None = None
    samples: int = 512
    length: int | None = None
    rows: int = 64
    seed: int = 0
    drawn: Path | None = None
    folder: Path = Path("experiments/masked_diffusion/results")

    def __post_init__(self) -> None:
        if not (self.steps and self.frontier and self.temperatures):
            raise ValueError("steps, frontier and temperatures need at least one number each")

    def of_curve(self, steps: int) -> tuple[float, ...]:
        """Temperatures of the teacher's curve of these steps."""
        longest = steps == max(self.frontier)
        return (self.most_temperatures or self.temperatures) if longest else self.temperatures

    @property
    def first(self) -> str:
        """The teacher."""
        return self.teacher or str(self.runs / "tiny-mdlm" / "model")

    @property
    def rounds(self) -> tuple[str, ...]:
        """The students.

        Raises:
          ValueError: there are none.
        """
        students = self.students or models_of(self.runs / "halves")
        if not students:
            raise ValueError(
                f"no student in {self.runs / 'halves'}: name --students, or train some with "
                f"sh experiments/recipes/sdtt.sh TEXT halves"
            )
        return students

    @property
    def judging(self) -> str:
        """The judge."""
        return self.judge or str(self.runs / "tiny-judge" / "model")

    @property
    def other(self) -> str | None:
        """The rival."""
        place = self.runs / "tiny-rival" / "model"
        return self.rival or (str(place) if place.exists() else None)

    def drawing(self) -> Drawing:
        """What all rows share."""
        length = load(self.first).network.max_length if self.length is None else self.length
        return Drawing(
            file=self.drawn or self.runs / "drawn.json",
            model=self.first,
            judge=self.judging,
            text=self.text,
            samples=self.samples,
            length=length,
            rows=self.rows,
            seed=self.seed,
        )


def models_of(run: Path) -> tuple[str, ...]:
    """Models of a run's rounds, in their order."""
    places = sorted(
        run.glob("round-*/model"), key=lambda path: int(path.parent.name.partition("-")[2])
    )
    return tuple(map(str, places))


def masked(steps: int, order: str = "random", **knobs: Any) -> Setting:
    """The clean sampler."""
    return Setting("masked", Masked(order=order), Masked.Knobs(steps=steps, **knobs))


def over_steps(
    name: str, place: str, options: Options, *, dtype: str = "float32", **choices: Any
) -> list[Line]:
    """A model at all steps."""
    return [Line(name, place, masked(steps, **choices), dtype) for steps in options.steps]


def rounds_of(options: Options) -> list[tuple[str, str]]:
    """Name and place of every student: a round has the number of its folder, or else its place in
    the list, after the name of its run where there are several.
    """
    students, runs = [], {Path(place).parent.parent.name for place in options.rounds}
    for i, place in enumerate(options.rounds, 1):
        folder = re.fullmatch(r"round-(\d+)", Path(place).parent.name)
        number = i if folder is None else int(folder[1]) + 1
        run = f"{Path(place).parent.parent.name}, " if len(runs) > 1 else ""
        students.append((f"{run}{number} round{'s' * (number > 1)}", place))
    return students


def of_rounds(options: Options) -> list[Line]:
    """The teacher and the student of every round."""
    lines = over_steps("teacher", options.first, options)
    for name, place in rounds_of(options):
        lines += over_steps(name, place, options)
    return lines


def of_precisions(options: Options) -> list[Line]:
    """Teacher and last student in two dtypes, and under the released draw over the whole vocabulary
    at once.
    """
    lines = []
    for name, place in (("teacher", options.first), ("student", options.rounds[-1])):
        for dtype in ("float32", "bfloat16"):
            lines += over_steps(f"{name}, {dtype}", place, options, dtype=dtype)
        for steps in options.steps:
            released = ReleasedMasked(program="sdtt", sampler="ancestral", steps=steps)
            lines.append(Line(f"{name}, released draws", place, Setting("released", released)))
    return lines


def of_frontier(options: Options) -> list[Line]:
    """The teacher's curves over temperature, students at all steps but the most, and the rival's
    curve.
    """
    lines = [
        Line(f"teacher, {steps} steps", options.first, masked(steps, temperature=temperature))
        for steps in options.frontier
        for temperature in options.of_curve(steps)
    ]
    fewer = [steps for steps in options.frontier if steps < max(options.frontier)]
    for name, place in rounds_of(options):
        lines += [Line(name, place, masked(steps)) for steps in fewer or options.frontier]
    if (rival_place := options.other) is not None:
        for temperature in options.temperatures:
            rival = Setting(
                "autoregressive", AutoRegressive(), AutoRegressive.Knobs(temperature=temperature)
            )
            lines.append(Line("autoregressive", rival_place, rival))
    return lines


@dataclasses.dataclass(frozen=True)
class Study:
    """One table and its picture.

    Attributes:
      title: what it shows, and the figures of the paper.
      lines: the rows.
    """

    title: str
    lines: Callable[[Options], Sequence[Line]]


STUDIES = {
    "rounds": Study(
        "Rounds and steps, of one run or several (figures 2 to 8, 10, 13 to 15, 19)", of_rounds
    ),
    "precision": Study("Precision of network and draws (figure 9)", of_precisions),
    "frontier": Study("Perplexity against entropy: students and the tempered teacher", of_frontier),
}


def equal_entropy(rows: Sequence[Row], options: Options) -> dict[str, list[dict[str, Any]]]:
    """Students over the teacher's curves, at as many steps and at the most, and the bars of the
    last student.
    """
    curves = {
        steps: [row for row in rows if row["line"] == f"teacher, {steps} steps"]
        for steps in options.frontier
    }
    students = [row for row in rows if "round" in row["line"]]
    pairs = [(row, steps) for row in students for steps in {row["steps"], max(options.frontier)}]
    at_one = {
        steps: row for steps, curve in curves.items() for row in curve if row["temperature"] == 1
    }
    last = students[-1]["model_sha256"]
    of_last = {row["steps"]: row for row in students if row["model_sha256"] == last}
    return {
        "at_equal_entropy": [frontier.compared(row, curves[steps]) for row, steps in pairs],
        "bars": frontier.bars(at_one, of_last),
    }


def draw_steps(rows: Sequence[Row], path: Path) -> None:
    """Perplexity, entropy and self-BLEU against steps, a line a model or sampler."""
    panels: dict[str, dict[str, list[tuple[float, float, Sequence[float]]]]] = {}
    for title, (field, interval) in PANELS.items():
        for row in rows:
            if row["steps"] is None or row[field] is None:
                continue
            bar = [] if interval is None else [end for end in row[interval] if end is not None]
            point = row["steps"], row[field], bar if len(bar) == 2 else [row[field]] * 2
            panels.setdefault(title, {}).setdefault(row["line"], []).append(point)
    draw_panels(panels, path, x="steps", logarithmic=(PERPLEXITY,))


def run(name: str, texts: Texts, options: Options) -> list[Row]:
    """Draws what is missing of a study, and writes, draws and prints the whole of it."""
    study = STUDIES[name]
    rows = texts.of(study.lines(options), study.title)
    more = equal_entropy(rows, options) if name == "frontier" else {}
    written = [{k: v for k, v in row.items() if k != "left_out"} for row in rows]
    dtypes = [dtype for row in rows for dtype in row["dtypes"]]
    result = {"title": study.title, "rows": written, **more}
    shown = dataclasses.asdict(options) | texts.shared | {"study": name, "teacher": options.first}
    write_record(options.folder / f"{name}.json", shown, result, dtypes=dtypes)
    draw = frontier.draw if name == "frontier" else draw_steps
    if_possible(draw, rows, options.folder.parent / "figures" / f"{name}.png")
    print(f"{study.title}: {len(rows)} rows of {options.samples} texts")
    for row in rows:
        bleu = "" if row["self_bleu"] is None else f"  self-BLEU {row['self_bleu']:5.2f}"
        print(
            f"{row['label']:58s} perplexity {row['judge_perplexity']:8.3f}  "
            f"4-gram entropy {row['fourgram_entropy']:7.4f}{bleu}"
        )
    for one in more.get("at_equal_entropy", ()):
        ratio = (
            "its entropy is not reached"
            if one["ratio"] is None
            else times(one["ratio"], one["ratio_interval"])
        )
        print(f"{one['line']}, {one['steps']} steps, over {one['curve']} at equal entropy: {ratio}")
    for one in more.get("bars", ()):
        value = "none" if one["value"] is None else times(one["value"], one["interval"])
        print(f"last student, {one['steps']} steps: {one['bar']} {value}, wanted {one['wanted']}")
    return rows


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Runs studies, writes their tables and draws them."""
    if not options.study:
        raise ValueError(f"name a study: {', '.join(STUDIES)} or all")
    if unknown := [name for name in options.study if name not in (*STUDIES, "all")]:
        raise ValueError(f"no study {', '.join(unknown)}: choose of {', '.join(STUDIES)} or all")
    texts = Texts(options.drawing())
    for name in STUDIES if "all" in options.study else options.study:
        run(name, texts, options)


if __name__ == "__main__":
    run_command(main)
