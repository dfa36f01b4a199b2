"""Settings of every rival on tuning problems: `python -m experiments.recurrent_depth.tune words`
(or `pointers`).

Equally many settings of each (`rival_settings`): depths of sequential decoding, criteria and
thresholds of adaptive decoding, depths and lengths of self-speculative drafts, blocks and depths of
Jacobi decoding, and for waves inner recurrence, width, headway and exit. All answers come first;
what keeps them is timed, in turns; the fastest of each rival is what `rivals` reports on problems
of the test split.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.recurrent_depth.rival_settings import TASKS, Drawn, place
from experiments.recurrent_depth.rival_times import Group, in_turns, over
from paradec_jax import facts, load
from paradec_jax.cli.output import progress
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source, case_of, prompts_of
from paradec_jax.evaluate.compare import compare
from paradec_jax.store import Model, names_of

RULE = (
    "Of the settings of a rival the one with the most tokens a second, among those whose share of exact answers does "
    "not lie below the baseline's by more than chance: the 95% interval of the paired difference reaches 0."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to try.

    Attributes:
      task: "words" or "pointers".
      model: a model folder or the name of a bundled one; the task's when None.
      problems: of the tuning split, for answers.
      seed: of problems and initial states.
      queries: names that a problem of pointers asks about, from 8 on.
      timed: problems of the speed measurement, at batch 1.
      passes: timings of each setting.
      rows: problems decoded together when only answers count.
      out: where the JSON goes; named after task and model when None.
    """

    task: tyro.conf.Positional[Literal["words", "pointers"]]
    model: str | None = None
    problems: int = 100
    seed: int = 0
    queries: int = 64
    timed: int = 3
    passes: int = 3
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
    def place(self) -> Path:
        """Where the table goes."""
        return self.out or Path(place("tuning", self.task, self.used))

    @property
    def used(self) -> str:
        """The model."""
        return self.model or TASKS[self.task].model

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        named = {"model": names_of([self.used])[0], "out": self.place.name}
        return dataclasses.asdict(self) | named


def keeps_answers(row: dict[str, Any]) -> bool:
    """Whether answers are not fewer than the baseline's by more than chance."""
    return row["difference_interval"][1] >= 0


def timed(
    model: Model, settings: Sequence[Setting], drawn: Drawn, options: Options
) -> list[dict[str, Any]]:
    """Seconds of each setting, the first of which is the baseline, as rows with the speed over it."""
    prompts = prompts_of(model, drawn.prompts, options.seed, drawn.budget)
    params = model.network.prepare(model.params)
    cases = [case_of(setting, model, prompts.size, params) for setting in settings]
    requests = [prompts.request([i]) for i in range(min(options.timed, len(drawn.prompts)))]
    with progress() as report:
        advance = report("timing in turns", options.passes)
        (times,) = in_turns([Group(cases, requests)], options.passes, advance)
    return [one.row() | over(one, times[0], "speedup") for one in times]


def sweep(model: Model, options: Options) -> list[dict[str, Any]]:
    """A row a setting, those of a rival beside each other; speeds of those that keep the answers."""
    task = TASKS[options.task]
    drawn = task.draw(options.problems, options.seed, "tune", options.queries)
    pairs = [(rival, one) for rival, of in task.grid(options.queries).items() for one in of]
    with progress() as report:
        found = compare(
            [Source(names_of([options.used])[0], model, setting) for _, setting in pairs],
            drawn.prompts,
            seed=options.seed,
            budget=drawn.budget,
            score=drawn.score,
            timed=0,
            rows=options.rows,
            report=report,
        )
    rows = [
        {"rival": rival, **row, "keeps_answers": keeps_answers(row)}
        for (rival, _), row in zip(pairs, found.rows, strict=True)
    ]
    wanted = [i for i, row in enumerate(rows) if row["keeps_answers"]]
    wanted.sort(key=lambda i: not rows[i]["baseline"])
    for i, speed in zip(
        wanted, timed(model, [pairs[i][1] for i in wanted], drawn, options), strict=True
    ):
        rows[i] |= speed
    return rows


def choice(rows: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    """The label that the rule chooses of each rival, None where no setting keeps the answers."""
    found: dict[str, str | None] = {}
    for rival in dict.fromkeys(row["rival"] for row in rows):
        kept = [row for row in rows if row["rival"] == rival and row["keeps_answers"]]
        fastest = max(kept, key=lambda row: row["tokens_per_second"], default=None)
        found[rival] = None if fastest is None else fastest["label"]
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table and what was chosen."""
    model = load(options.used)
    if model.family != "recurrent_depth" or model.tokenizer is None:
        raise SystemExit(f"{options.used} must be a recurrent-depth model with a tokenizer")
    rows = sweep(model, options)
    chosen = choice(rows)
    for row in rows:
        speed = (
            f"{row['tokens_per_second']:8,.0f} tokens/s"
            if row["keeps_answers"]
            else "too many lost"
        )
        mark = "*" if chosen[row["rival"]] == row["label"] else " "
        print(
            f"{mark} {row['rival']}: {row['label']}: {row['exact']}/{row['problems']}, "
            f"{row['network_calls_per_token']:.2f} calls and {row['recurrences_per_token']:.2f} recurrences a token, "
            f"{speed}"
        )
    tried = {rival: sum(row["rival"] == rival for row in rows) for rival in chosen}
    print(f"settings tried: {', '.join(f'{count} of {rival}' for rival, count in tried.items())}")
    print(f"rule: {RULE}")
    result = {"rule": RULE, "settings_tried": tried, "chosen": chosen, "rows": rows}
    write_record(options.place, options.facts(), result, dtypes=facts.dtypes(model.params))
    print(f"written: {options.place}")


if __name__ == "__main__":
    run(main)
