"""Students of a law that is known, distilled in other ways: divergences, lengths of rounds, jumps,
resets, grids.

`python -m experiments.masked_diffusion.markov_variants`, after `markov_train`. A variant is called
as on the other ground (`recipes/sdtt.sh`) and differs from the run's own students in the same way.
All begin at the same teacher and end at the same aim. But for the studied length of rounds all have
as many updates as `half-rounds`, half of the run's own students', which are `halves`; where a round
jumps farther there are fewer rounds, each of more updates:

    half-rounds 32 -> 16 -> 8 -> 4 -> 2      fourths 32 -> 8 -> 2      eighths 16 -> 2

The last student of each is measured as `markov_study` does it, at equal seeds, and on request those
of all rounds where the length of rounds is studied. A network in bfloat16 stands beside its float32
one. What was trained and measured stays in FOLDER/variants and FOLDER/measured: a call that was
stopped goes on when it is given again.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels
from experiments.common.processes import alone
from experiments.common.record import write_record
from experiments.masked_diffusion import markov_study
from experiments.masked_diffusion.markov import ChainDenoiser
from experiments.masked_diffusion.markov_study import PERFECT, TEACHER, Measured, Writer
from experiments.masked_diffusion.markov_train import distilled, recipe_of
from paradec_jax import facts
from paradec_jax.objectives.sdtt import Sdtt

OWN, REFERENCE = "halves", "half-rounds"
STUDIES = {
    "round_lengths": (OWN, REFERENCE, "short-rounds"),
    "divergences": (REFERENCE, "forward-kl", "tvd", "tvd-released", "mse", "chi-square"),
    "jumps": (REFERENCE, "fourths", "eighths"),
    "resets": (REFERENCE, "optimizer-reset", "ema-teacher", "ema-teacher-reset"),
    "targets": (REFERENCE, "grid-released"),
}
NAMES = tuple(dict.fromkeys(name for names in STUDIES.values() for name in names))
# What differs from a run's own students: share of a round's updates (else a half), jump over
# theirs, rules, rounds.
LENGTHS = {OWN: 1.0, "short-rounds": 0.25}
JUMPS = {"fourths": 2, "eighths": 4}
RULES: dict[str, dict[str, Any]] = {
    **{
        name: {"divergence": name.replace("-", "_")}
        for name in ("forward-kl", "tvd", "mse", "chi-square")
    },
    "tvd-released": {"divergence": "tvd", "released": True},
    "grid-released": {"grid": "released"},
}
ROUNDS: dict[str, dict[str, Any]] = {
    "optimizer-reset": {"reset_optimizer": True},
    "ema-teacher": {"weights": "ema", "reset_ema": True},
    "ema-teacher-reset": {"weights": "ema", "reset_ema": True, "reset_optimizer": True},
}
Sweeps = Mapping[int, Sequence[Measured]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train and to measure.

    Attributes:
      folder: of the run.
      variants: their names.
      samples: of a row.
      draws: partitions of a sample, by which the entropy is estimated.
      steps: N.
      temperatures: the lower ones, of the perfect denoiser.
      texts: by which bounds are taken.
      masks: of each of them.
      seed: of all draws.
      each_round: whether students of all rounds are measured where the length of rounds is studied.
      minutes: after so many a training saves and the call ends; the next one goes on.
      out: where the JSON goes.
      figures: the folder of the pictures.
    """

    folder: Path = Path("runs/markov")
    variants: tuple[str, ...] = NAMES
    samples: int = 500
    draws: int = 4
    steps: tuple[int, ...] = (2, 4, 8)
    temperatures: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    texts: int = 256
    masks: int = 32
    seed: int = 0
    each_round: bool = False
    minutes: float = 60.0
    out: Path = Path("experiments/masked_diffusion/results/markov_variants.json")
    figures: Path = Path("experiments/masked_diffusion/figures")

    def __post_init__(self) -> None:
        if REFERENCE not in self.variants or not set(self.variants) <= set(NAMES):
            raise ValueError(
                f"variants must be {REFERENCE} and others of {', '.join(NAMES)}, not {self.variants}"
            )
        self.measures()

    def measures(self) -> markov_study.Options:
        """The same for `markov_study`, which refuses what cannot be measured."""
        shared = {field.name for field in dataclasses.fields(markov_study.Options)} - {
            "out",
            "figure",
            "swept",
        }
        told = {name: getattr(self, name) for name in shared}
        return markov_study.Options(**told, swept=self.steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Student:
    """A model to measure.

    Attributes:
      variant: its name.
      which: its round, counted from 1; 0 is the teacher.
      aim: the steps that it was made for; None of the teacher.
      writer: its weights.
      other: name of the writer that it is compared with.
    """

    variant: str
    which: int
    aim: float | None
    writer: Writer
    other: str


def variant(name: str, own: Sdtt, updates: int) -> tuple[Sdtt, int]:
    """What a name means beside a run's own students of so many updates a round: students, and
    updates of a round.
    """
    steps, aim = own.rounds * max(int(updates * LENGTHS.get(name, 0.5)), 1), own.aim
    jump, rounds = own.rules.jump * JUMPS.get(name, 1), own.rounds
    if name in JUMPS:
        reached = (n for n in range(1, own.rounds + 1) if aim * jump**n <= own.rules.first_steps)
        rounds = max(reached, default=1)
    changes = {"jump": jump, "first_steps": aim * jump**rounds, **RULES.get(name, {})}
    rules = dataclasses.replace(own.rules, **changes)
    return dataclasses.replace(
        own, rounds=rounds, rules=rules, **ROUNDS.get(name, {})
    ), steps // rounds


def trained(options: Options) -> dict[str, tuple[Sdtt, Path]] | None:
    """Rounds and folder of each variant, trained where it was not; None where the minutes were
    over.

    Raises:
      ValueError: a folder whose teacher or own students are not done.
    """
    until, run = time.monotonic() + 60 * options.minutes, recipe_of(options.folder)
    for part in ("teacher", "students"):
        if not (options.folder / part / "model").exists():
            raise ValueError(f"{options.folder / part} is not done: go on with `markov_train`")
    found = {}
    for name in options.variants:
        students, updates = variant(name, run.students, run.round_updates)
        place = options.folder / ("students" if name == OWN else f"variants/{name}")
        if not distilled(students, updates, place, options.folder, until):
            return None
        found[name] = students, place
    return found


def students_of(
    runs: Mapping[str, tuple[Sdtt, Path]], folder: Path, each_round: bool
) -> Iterator[Student]:
    """Whom to measure: the last student of each variant, more rounds of some, and some in bfloat16."""
    recipe = runs[REFERENCE][0]
    reference = f"{REFERENCE}-{recipe.rounds}"
    for name, (recipe, place) in runs.items():
        for which in range(recipe.rounds):
            last = which == recipe.rounds - 1
            if last or (each_round and name in STUDIES["round_lengths"]):
                model = place / f"round-{which}" / "model"
                aim, writer = markov_study.aim_of(recipe, which), f"{name}-{which + 1}"
                other = reference if last else TEACHER
                yield Student(name, which + 1, aim, markov_study.writer_of(writer, model), other)
    half = markov_study.writer_of(f"{TEACHER}-bfloat16", folder / TEACHER / "model", "bfloat16")
    yield Student(f"{TEACHER}, bfloat16", 0, None, half, TEACHER)
    recipe, place = runs[REFERENCE]
    model = place / f"round-{recipe.rounds - 1}" / "model"
    half = markov_study.writer_of(f"{reference}-bfloat16", model, "bfloat16")
    aim = markov_study.aim_of(recipe, recipe.rounds - 1)
    yield Student(f"{REFERENCE}, bfloat16", recipe.rounds, aim, half, reference)


def rows_of(
    student: Student,
    found: Mapping[tuple[str, int], Measured],
    sweeps: Sweeps,
    cost: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The rows of a model, one a number of steps; figures in nats a symbol, of bounds in nats a
    text.
    """
    for steps, sweep in sweeps.items():
        mine = found[student.writer.name, steps]
        row = {"variant": student.variant, "round": student.which, "aims_at": student.aim}
        row |= markov_study.row_of((student.writer.name, steps, 1.0), mine)
        for name, difference in (
            ("over_the_other", markov_study.apart(mine, found[student.other, steps])),
            ("over_the_perfect", markov_study.at_equal_entropy(mine, sweep)),
        ):
            value, ends = (None, [None, None]) if difference is None else difference
            row |= {name: value, f"{name}_interval": ends}
        kept = ("bound", "bound_interval", "over_the_floor", "over_the_floor_interval")
        yield row | {"other": student.other} | {name: cost[name] for name in kept}


def told(row: Mapping[str, Any]) -> str:
    """A row for the eye."""
    perfect = (
        "beyond the sweep" if row["over_the_perfect"] is None else f"{row['over_the_perfect']:+.4f}"
    )
    return (
        f"{row['model']:24s} N {row['steps']:2d}  KL {row['kl']:.4f} [{row['kl_interval'][0]:.4f}, "
        f"{row['kl_interval'][1]:.4f}]  entropy {row['entropy']:.4f}  over the other {row['over_the_other']:+.4f}  "
        f"over the tempered perfect {perfect}  bound over the floor {row['over_the_floor']:.3f}"
    )


def plot(
    rows: Sequence[Mapping[str, Any]], perfect: Sequence[Mapping[str, Any]], options: Options
) -> None:
    """A picture a study: KL over entropy, a panel for each N below 8, and the tempered perfect
    denoiser in each.
    """
    for study, names in STUDIES.items():
        some = [row for row in rows if row["variant"] in names]
        if len({row["variant"] for row in some}) < 2:
            continue
        panels = {}
        for steps in [steps for steps in options.steps if steps < 8]:
            lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
            for row in (*perfect, *some):
                of_round = study == "round_lengths" or row.get("other") != TEACHER
                if row["steps"] == steps and of_round:
                    name = row.get("variant", "perfect, temperatures")
                    lines.setdefault(name, []).append(
                        (row["entropy"], row["kl"], row["kl_interval"])
                    )
            panels[f"KL to the law, nats a symbol, N = {steps}"] = lines
        draw_panels(
            panels, options.figures / f"markov-{study}.png", x="entropy, nats a symbol", log_x=False
        )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains what is missing, measures, prints, writes and draws the rows."""
    alone()
    runs = trained(options)
    if runs is None:
        return
    run, measures = recipe_of(options.folder), options.measures()
    perfect = Writer(PERFECT, ChainDenoiser(run.chain), None, run.chain.digest)
    teacher = markov_study.writer_of(TEACHER, options.folder / TEACHER / "model")
    sweeps, of_perfect = {}, []
    for steps in options.steps:
        temperatures = (1.0, *options.temperatures)
        sweeps[steps] = [
            markov_study.measure(perfect, run.chain, steps, t, measures) for t in temperatures
        ]
        of_perfect += [
            markov_study.row_of((PERFECT, steps, t), one)
            for t, one in zip(temperatures, sweeps[steps], strict=True)
        ]
    students = [
        Student(TEACHER, 0, None, teacher, TEACHER),
        *students_of(runs, options.folder, options.each_round),
    ]
    costs = markov_study.bounds_of(
        [perfect, *(one.writer for one in students)], run.chain, measures
    )
    of_model = {cost["model"]: cost for cost in costs}
    found = {}
    for one in students:
        for steps in options.steps:
            name = one.writer.name
            found[name, steps] = markov_study.measure(one.writer, run.chain, steps, 1.0, measures)
            print(f"measured {name}, N {steps}", flush=True)
    rows = [
        row for one in students for row in rows_of(one, found, sweeps, of_model[one.writer.name])
    ]
    print("\n".join(map(told, rows)))
    models = {one.writer.name: one.writer.sha256 for one in students}
    recipes = {name: dataclasses.asdict(recipe) for name, (recipe, _) in runs.items()}
    result = {"recipes": recipes, "models_sha256": models, "perfect": of_perfect, "rows": rows}
    dtypes = facts.dtypes([one.writer.params for one in students])
    write_record(options.out, options, result, dtypes=dtypes)
    plot(rows, of_perfect, options)


if __name__ == "__main__":
    run_command(main)
