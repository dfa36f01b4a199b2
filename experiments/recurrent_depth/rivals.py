"""Tuned rivals on unseen problems, timed in turns: `python -m experiments.recurrent_depth.rivals
words` (`pointers`).

Every rival with the setting that `tune` chose for it, sequential decoding at further depths, and on
word problems the causal models, all in one process on the same problems. It says how much a
wavefront adds over token parallelism, in four numbers: autoregressive decoding at the depth that
answers need, Jacobi decoding at that depth (one block or a running window), a wave that opens one
position a step, and a wave with headway. And it names the fastest way of all to answers that are
not fewer than the baseline's. Of several rivals the fastest on these very problems counts, which
favours them over a wave.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.recurrent_depth import rival_settings
from experiments.recurrent_depth.rival_settings import (
    ONE,
    PARALLEL,
    SEQUENTIAL,
    SEVERAL,
    TASKS,
    Drawn,
    Grid,
)
from experiments.recurrent_depth.rival_times import Group, Times, in_turns, over
from experiments.recurrent_depth.tune import keeps_answers
from paradec_jax import facts, load
from paradec_jax.cli.output import progress
from paradec_jax.decode import AutoRegressive, Jacobi
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source, case_of, prompts_of
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.intervals import paired
from paradec_jax.store import Model, names_of

# Of causal models, whose tuning is that of `paradec compare causal`.
CAUSAL = (
    ("autoregressive", Setting("autoregressive", AutoRegressive(), baseline=True)),
    (PARALLEL[0], Setting("jacobi", Jacobi(block=16))),
    (PARALLEL[1], Setting("jacobi", Jacobi(block=8, running=True))),
    (PARALLEL[1], Setting("jacobi", Jacobi(block=16, running=True))),
)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
      task: "words" or "pointers".
      model: a model folder or the name of a bundled one; the task's when None.
      others: models of the causal family that answer the same problems; the task's when None.
      tuning: the table that `tune` wrote; by default where it writes it.
      problems: of the test split, for answers.
      seed: of problems and initial states.
      queries: names that a problem of pointers asks about.
      timed: problems of the speed measurement, at batch 1.
      passes: timings of each decoder.
      rows: problems decoded together when only answers count.
      out: where the JSON goes; named after task and model when None.
    """

    task: tyro.conf.Positional[Literal["words", "pointers"]]
    model: str | None = None
    others: tuple[str, ...] | None = None
    tuning: Path | None = None
    problems: int = 1000
    seed: int = 1
    queries: int = 64
    timed: int = 16
    passes: int = 5
    rows: int = 50
    out: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("problems", 1),
            ("queries", 8),
            ("timed", 1),
            ("passes", 1),
            ("rows", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def models(self) -> tuple[str, ...]:
        """The recurrent model, then the others."""
        task = TASKS[self.task]
        return (self.model or task.model, *(task.others if self.others is None else self.others))

    @property
    def table(self) -> Path:
        """What was tuned."""
        return self.tuning or Path(rival_settings.place("tuning", self.task, self.models[0]))

    @property
    def place(self) -> Path:
        """Where the table goes."""
        return self.out or Path(rival_settings.place("rivals", self.task, self.models[0]))

    def facts(self) -> Row:
        """As JSON values."""
        model, *others = names_of(list(self.models))
        told = {"model": model, "others": others, "tuning": self.table.name, "out": self.place.name}
        return dataclasses.asdict(self) | told


def tuned(path: Path, grid: Grid, options: Options) -> dict[str, Setting]:
    """The setting that was chosen of each rival; those of which none keeps the answers are missing.

    Raises:
      ValueError: no such table, one of another task, or one whose settings are no longer tried.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: run python -m experiments.recurrent_depth.tune {options.task}"
        )
    table = json.loads(path.read_text())
    wanted = {name: options.facts()[name] for name in ("task", "model", "queries")}
    if other := [name for name in wanted if table["options"][name] != wanted[name]]:
        raise ValueError(f"{path} was tuned with another {', '.join(other)}: run tune again")
    found = {}
    for rival, label in table["chosen"].items():
        named = [setting for setting in grid.get(rival, []) if setting.label() == label]
        if label is not None and not named:
            raise ValueError(
                f"{path} chose {rival}, {label}, which is no longer tried: run tune again"
            )
        if named:
            found[rival] = named[0]
    return found


def contestants(options: Options) -> list[tuple[str, Setting]]:
    """The baseline, sequential decoding at further depths, and what was chosen of each rival."""
    task = TASKS[options.task]
    grid = task.grid(options.queries)
    sequential = grid[SEQUENTIAL[0]]
    chosen = tuned(options.table, grid, options)
    prefill = next(setting for setting in sequential if setting.baseline).decoder.prefill_recurrence
    beside = [rival_settings.static(depth, prefill) for depth in task.beside]
    rows = [(SEQUENTIAL[0], setting) for setting in sequential if setting.baseline]
    rows += [(SEQUENTIAL[0], setting) for setting in beside]
    labels = {setting.label() for _, setting in rows}
    return rows + [
        (rival, setting)
        for rival, setting in chosen.items()
        if rival != SEQUENTIAL[0] or setting.label() not in labels
    ]


def answers(
    model: Model, name: str, pairs: Sequence[tuple[str, Setting]], drawn: Drawn, options: Options
) -> tuple[list[Row], Any]:
    """A row a decoder, and which problems each got right, [rows, problems]."""
    with progress() as report:
        found = compare(
            [Source(name, model, setting) for _, setting in pairs],
            drawn.prompts,
            seed=options.seed,
            budget=drawn.budget,
            score=drawn.score,
            timed=0,
            rows=options.rows,
            report=lambda stage, units: report(f"{name}: {stage}", units),
        )
    rows = [{"rival": rival} | row for (rival, _), row in zip(pairs, found.rows, strict=True)]
    return rows, found.exact


def group_of(
    model: Model, pairs: Sequence[tuple[str, Setting]], drawn: Drawn, options: Options
) -> Group:
    """A model's decoders and the problems that are timed."""
    prompts = prompts_of(model, drawn.prompts, options.seed, drawn.budget)
    params = model.network.prepare(model.params)
    cases = [case_of(setting, model, prompts.size, params) for _, setting in pairs]
    return Group(
        cases, [prompts.request([i]) for i in range(min(options.timed, len(drawn.prompts)))]
    )


def measured(options: Options) -> tuple[list[Row], list[Times], list[str]]:
    """All rows, the baseline first, their times, and the dtypes of the parameters."""
    drawn = TASKS[options.task].draw(options.problems, options.seed, "test", options.queries)
    rows: list[Row] = []
    exact, groups = [], []
    names = names_of(list(options.models))
    models = [load(name) for name in options.models]
    if models[0].family != "recurrent_depth" or any(
        other.family != "causal" for other in models[1:]
    ):
        raise ValueError("the model must be of family recurrent_depth, the others of family causal")
    for model, name in zip(models, names, strict=True):
        pairs: Sequence[tuple[str, Setting]] = (
            contestants(options) if model is models[0] else CAUSAL
        )
        found, right = answers(model, name, pairs, drawn, options)
        rows += found
        exact.append(right)
        groups.append(group_of(model, pairs, drawn, options))
    right = np.concatenate(exact)
    for row, mine in zip(rows, right, strict=True):
        of = paired(mine, right[0])
        row |= {"difference": of.difference, "difference_interval": list(of.interval)}
        row |= {"only_here_exact": of.only_first, "only_baseline_exact": of.only_second}
        row["baseline"] = row is rows[0]
        row["keeps_answers"] = keeps_answers(row)
        if row["model"] != names[0]:
            del row["equals_greedy"]  # that was greedy decoding of its own model
    with progress() as report:
        advance = report("timing in turns", options.passes * len(groups))
        found_times = in_turns(groups, options.passes, advance)
    times = [one for of in found_times for one in of]
    return rows, times, facts.dtypes(*(model.params for model in models))


def fastest(
    rows: Sequence[Row], times: Sequence[Times], rivals: Sequence[str], **choices: Any
) -> int | None:
    """Index of the fastest row of these rivals that keeps the answers; `choices` are settings that
    it must have.
    """
    fitting = [
        i
        for i, row in enumerate(rows)
        if row["rival"] in rivals
        and row["keeps_answers"]
        and row["model"] == rows[0]["model"]
        and all(row["settings"].get(name) == value for name, value in choices.items())
    ]
    return max(fitting, key=lambda i: times[i].tokens_per_second, default=None)


def four_numbers(rows: Sequence[Row], times: Sequence[Times]) -> list[Row]:
    """Autoregressive decoding at the depth needed, Jacobi decoding at that depth, and both kinds of
    waves.

    The depth needed is the least that keeps the answers, which is not the fastest one where their
    times are as good as equal.
    """
    kept = [
        row["settings"]["recurrence"]
        for row in rows
        if row["rival"] == SEQUENTIAL[0]
        and row["keeps_answers"]
        and row["model"] == rows[0]["model"]
    ]
    depth = min(kept)  # the baseline keeps its own answers
    sequential = fastest(rows, times, SEQUENTIAL[:1], recurrence=depth)
    assert sequential is not None
    beside = fastest(rows, times, PARALLEL, recurrence=depth)
    named = {
        f"autoregressive, r = {depth}": sequential,
        f"Jacobi, r = {depth}": beside,
        ONE: fastest(rows, times, (ONE,)),
        SEVERAL: fastest(rows, times, (SEVERAL,)),
    }
    found: list[Row] = []
    for name, i in named.items():
        if i is None:
            found.append({"name": name, "label": None})
            continue
        row: Row = {"name": name, "rival": rows[i]["rival"], "label": rows[i]["label"]}
        row |= {"tokens_per_second": times[i].tokens_per_second}
        row |= over(times[i], times[sequential], "over_autoregressive")
        found.append(row | ({} if beside is None else over(times[i], times[beside], "over_jacobi")))
    return found


def summary(rows: list[Row], times: Sequence[Times]) -> Row:
    """Adds speeds to the rows; the four numbers, the best sequential rival, and the best way of
    all.
    """
    best = fastest(rows, times, SEQUENTIAL)
    assert best is not None
    for row, one in zip(rows, times, strict=True):
        row |= (
            one.row() | over(one, times[0], "speedup") | over(one, times[best], "over_sequential")
        )
    kept = [row for row in rows if row["keeps_answers"]]
    winner = max(kept, key=lambda row: row["tokens_per_second"])
    told = [
        {name: row[name] for name in ("model", "rival", "label")} for row in (rows[best], winner)
    ]
    return {
        "best_sequential": told[0],
        "best_way": told[1],
        "four_numbers": four_numbers(rows, times),
    }


def printed(rows: Sequence[Row], result: Row) -> None:
    """The table, the four numbers and the best way."""
    for row in rows:
        low, high = row["speedup_range"]
        print(
            f"{row['model']}, {row['rival']}: {row['label']}: {row['exact']}/{row['problems']}"
            f"{'' if row['keeps_answers'] else ' (too many lost)'}, {row['network_calls_per_token']:.2f} calls and "
            f"{row['recurrences_per_token']:.2f} recurrences a token, {row['tokens_per_second']:,.0f} tokens/s, "
            f"{row['speedup']:.2f}x [{low:.2f}, {high:.2f}], {row['over_sequential']:.2f}x the best sequential rival"
        )
    for row in result["four_numbers"]:
        if row["label"] is None:
            print(f"{row['name']}: no setting keeps the answers")
            continue
        told = ", ".join(
            f"{row[name]:.2f}x [{row[f'{name}_range'][0]:.2f}, {row[f'{name}_range'][1]:.2f}] {what}"
            for name, what in (("over_autoregressive", "autoregressive"), ("over_jacobi", "Jacobi"))
            if name in row
        )
        print(f"{row['name']} ({row['label']}): {row['tokens_per_second']:,.0f} tokens/s, {told}")
    for name in ("best_sequential", "best_way"):
        print(f"{name.replace('_', ' ')}: {', '.join(result[name].values())}")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    rows, times, dtypes = measured(options)
    result = summary(rows, times)
    printed(rows, result)
    write_record(options.place, options.facts(), {**result, "rows": rows}, dtypes=dtypes)
    print(f"written: {options.place}")


if __name__ == "__main__":
    run(main)
