"""Baselines tuned on some chains of pointers, then compared on unseen ones, all timed in turns.

    python -m experiments.recurrent_depth.rivals --tune --problems 100 --seed 0 --timed 3 --passes 3
    python -m experiments.recurrent_depth.rivals

(On word problems `experiments.families.table` compares them with all families.) With `--tune`
equally many settings of each rival (`rival_settings`) are tried on problems of the tuning split.
All answers come first; what keeps them is timed; the fastest of each rival is chosen.

Without it what was chosen is compared on problems of the test split, beside sequential decoding at
further depths. It says how much a wavefront adds over
token parallelism, in four numbers: autoregressive decoding at the depth that answers need, Jacobi
decoding at that depth (one block or a running window), a wave that opens one position a step, and a
wave with headway. And it names the fastest way of all to answers that are not fewer than the
baseline's. Of several rivals the fastest on these very problems counts, which favours them over a
wave.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.problems import Problems, of_pointers
from experiments.common.record import write_record
from experiments.recurrent_depth.rival_settings import (
    BESIDE,
    ONE,
    PARALLEL,
    SEQUENTIAL,
    SEVERAL,
    Grid,
    grid,
    static,
)
from paradec_jax import facts, load
from paradec_jax.cli.output import progress
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source, case_of, prompts_of
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.intervals import paired, speedup
from paradec_jax.evaluate.timing import Speed, measure
from paradec_jax.store import Model, names_of

RULE = (
    "Of the settings of a rival the one with the most tokens a second, among those whose share of exact answers does "
    "not lie below the baseline's by more than chance: the 95% interval of the paired difference reaches 0."
)
NEAREST = 8  # look-ups of pointers
Row = dict[str, Any]
Pairs = Sequence[tuple[str, Setting]]  # rivals and their settings


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
      tune: whether settings are chosen; else those that were chosen are compared.
      model: folder of a model that `pointers.py` trained.
      tuning: the table that `--tune` wrote; by default where it writes it.
      problems: for answers.
      seed: of problems and initial states.
      queries: names that a problem asks about, from 8 on.
      timed: problems of the speed measurement, at batch 1.
      passes: timings of each setting.
      rows: problems decoded together when only answers count.
      out: where the JSON goes; named after the model when None.
    """

    tune: bool = False
    model: str = "runs/wide-pointers/model"
    tuning: Path | None = None
    problems: int = 1000
    seed: int = 1
    queries: int = 64
    timed: int = 16
    passes: int = 5
    rows: int = 50
    out: Path | None = None

    def place(self, kind: str) -> Path:
        """Where a table of "tuning" or of "rivals" goes."""
        name = f"{kind}-pointers-{names_of([self.model])[0]}.json"
        return Path("experiments/recurrent_depth/results") / name

    def facts(self) -> Row:
        """As JSON values, defaults put in."""
        places = {
            "tuning": self.tuning or self.place("tuning"),
            "out": self.out or self.place("tuning" if self.tune else "rivals"),
        }
        return dataclasses.asdict(self) | {"model": names_of([self.model])[0]} | places


def tuned(tried: Grid, options: Options) -> dict[str, Setting]:
    """The setting that was chosen of each rival; those of which none keeps the answers are missing.

    Raises:
      ValueError: no such table, one of another task, or one whose settings are no longer tried.
    """
    path, asked = options.tuning or options.place("tuning"), options.facts()
    if not path.is_file():
        raise ValueError(f"{path} is missing: choose settings with --tune first")
    table = json.loads(path.read_text())
    names = ("model", "queries")
    if other := [name for name in names if table["options"][name] != asked[name]]:
        raise ValueError(f"{path} was tuned with another {', '.join(other)}: tune again")
    chosen = {}
    for rival, label in table["chosen"].items():
        settings = [setting for setting in tried.get(rival, []) if setting.label() == label]
        if label is not None and not settings:
            raise ValueError(f"{path} chose {rival}, {label}, which is no longer tried: tune again")
        if settings:
            chosen[rival] = settings[0]
    return chosen


def contestants(options: Options) -> Pairs:
    """All settings that are tried; or the baseline, sequential decoding at further depths, and what
    was chosen of each rival.
    """
    tried = grid(options.queries)
    if options.tune:
        return [(rival, setting) for rival, settings in tried.items() for setting in settings]
    sequential = SEQUENTIAL[0]
    (baseline,) = (setting for setting in tried[sequential] if setting.baseline)
    rows = [baseline, *(static(depth) for depth in BESIDE)]
    labels = {setting.label() for setting in rows}
    return [
        *((sequential, setting) for setting in rows),
        *(
            (rival, setting)
            for rival, setting in tuned(tried, options).items()
            if rival != sequential or setting.label() not in labels
        ),
    ]


def answers(model: Model, pairs: Pairs, drawn: Problems, options: Options) -> list[Row]:
    """A row a setting, compared with the baseline."""
    with progress() as report:
        compared = compare(
            [Source(names_of([options.model])[0], model, setting) for _, setting in pairs],
            drawn.prompts,
            seed=options.seed,
            budget=drawn.budget,
            score=drawn.score,
            timed=0,
            rows=options.rows,
            report=report,
        )
    rows: list[Row] = [
        {"rival": rival, **row} for (rival, _), row in zip(pairs, compared.rows, strict=True)
    ]
    base = next(i for i, row in enumerate(rows) if row["baseline"])
    for i, row in enumerate(rows):
        pair = paired(compared.exact[i], compared.exact[base])
        row |= {"difference": pair.difference, "difference_interval": list(pair.interval)}
        row |= {"only_here_exact": pair.only_first, "only_baseline_exact": pair.only_second}
        row["keeps_answers"] = pair.interval[1] >= 0
    return rows


def timed(
    model: Model, settings: Sequence[Setting], drawn: Problems, options: Options
) -> list[Speed]:
    """Times settings, each once a pass, so that what else the machine does falls on all alike."""
    prompts = prompts_of(model, drawn.prompts, options.seed, drawn.budget)
    params = model.network.prepare(model.params)
    cases = [case_of(setting, model, prompts.size, params) for setting in settings]
    requests = [prompts.request([i]) for i in range(min(options.timed, len(drawn.prompts)))]
    with progress() as report:
        advance = report("timing in turns", len(cases) * (options.passes + 1))
        return measure(cases, requests, passes=options.passes, advance=advance)


def speed_row(speed: Speed) -> Row:
    """As JSON values; `decode_tokens_per_second` leaves out prompts and the token that each
    predicts.
    """
    reading = [sum(seconds) for seconds in speed.each_reading]
    steps = [max(a - b, 1e-9) for a, b in zip(speed.passes, reading, strict=True)]
    return {
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_range": [speed.tokens / end(speed.passes) for end in (max, min)],
        "decode_tokens_per_second": (speed.tokens - len(speed.decoded)) / statistics.median(steps),
        "timed_problems": len(speed.decoded),
        "generated": list(speed.generated),
        "each": [list(seconds) for seconds in speed.each],
        "prompt_seconds": reading,
        "timed_calls": speed.calls,
    }


def over(first: Speed, second: Speed, name: str) -> Row:
    """How many times the tokens a second of another, under a name, and its range
    (`intervals.speedup`).
    """
    sides = [np.asarray(x) for of in (first, second) for x in (of.generated, of.each)]
    ratio, interval = speedup(*sides)
    return {name: ratio, f"{name}_range": list(interval)}


def fastest(
    rows: Sequence[Row], speeds: Sequence[Speed], rivals: Sequence[str], **choices: Any
) -> int | None:
    """Index of the fastest row of these rivals that keeps the answers; `choices` are settings that
    it must have.
    """
    fitting = [
        i
        for i, row in enumerate(rows)
        if row["rival"] in rivals
        and row["keeps_answers"]
        and all(row["settings"].get(name) == value for name, value in choices.items())
    ]
    return max(fitting, key=lambda i: speeds[i].tokens_per_second, default=None)


def four_numbers(rows: Sequence[Row], speeds: Sequence[Speed]) -> list[Row]:
    """Autoregressive decoding at the depth needed, Jacobi decoding at that depth, and both kinds of
    waves.

    The depth needed is the least that keeps the answers, which is not the fastest one where their
    times are as good as equal.
    """
    depth = min(  # the baseline keeps its answers
        row["settings"]["recurrence"]
        for row in rows
        if row["rival"] == SEQUENTIAL[0] and row["keeps_answers"]
    )
    sequential = fastest(rows, speeds, SEQUENTIAL[:1], recurrence=depth)
    assert sequential is not None
    beside = fastest(rows, speeds, PARALLEL, recurrence=depth)
    places = {
        f"autoregressive, r = {depth}": sequential,
        f"Jacobi, r = {depth}": beside,
        ONE: fastest(rows, speeds, (ONE,)),
        SEVERAL: fastest(rows, speeds, (SEVERAL,)),
    }
    numbers: list[Row] = []
    for name, i in places.items():
        if i is None:
            numbers.append({"name": name, "label": None})
            continue
        row: Row = {"name": name, "rival": rows[i]["rival"], "label": rows[i]["label"]}
        row |= {"tokens_per_second": speeds[i].tokens_per_second}
        row |= over(speeds[i], speeds[sequential], "over_autoregressive")
        more = {} if beside is None else over(speeds[i], speeds[beside], "over_jacobi")
        numbers.append(row | more)
    return numbers


def summary(rows: list[Row], speeds: Sequence[Speed]) -> Row:
    """Adds speeds over the best sequential rival to the rows; the four numbers, that rival, and the
    best way of all.
    """
    best = fastest(rows, speeds, SEQUENTIAL)
    assert best is not None
    for row, speed in zip(rows, speeds, strict=True):
        row |= over(speed, speeds[best], "over_sequential")
    right = [row for row in rows if row["keeps_answers"]]
    ways = {
        "best_sequential": rows[best],
        "best_way": max(right, key=lambda row: row["tokens_per_second"]),
    }
    places = {name: {key: row[key] for key in ("rival", "label")} for name, row in ways.items()}
    return {**places, "four_numbers": four_numbers(rows, speeds)}


def choice(rows: Sequence[Row]) -> Row:
    """The label that the rule chooses of each rival, None where no setting keeps the answers."""
    tried = {row["rival"]: 0 for row in rows}
    chosen: dict[str, str | None] = dict.fromkeys(tried)
    for row in sorted(rows, key=lambda row: -row.get("tokens_per_second", 0.0)):
        tried[row["rival"]] += 1
        if row["keeps_answers"] and chosen[row["rival"]] is None:
            chosen[row["rival"]] = row["label"]
    return {"rule": RULE, "settings_tried": tried, "chosen": chosen}


def shown(row: Row) -> str:
    """A row in a line."""
    speed = "too many lost"
    if "speedup" in row:
        low, high = row["speedup_range"]
        lost = "" if row["keeps_answers"] else " (too many lost)"
        speed = (
            f"{row['tokens_per_second']:,.0f} tokens/s{lost}, {row['speedup']:.2f}x "
            f"[{low:.2f}, {high:.2f}]"
        )
    return (
        f"{row['rival']}: {row['label']}: {row['exact']}/{row['problems']}, "
        f"{row['network_calls_per_token']:.2f} calls and {row['recurrences_per_token']:.2f} "
        f"recurrences a token, {speed}"
    )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table, and what was chosen or the four numbers.

    Raises:
      ValueError: a model of another family.
    """
    model = load(options.model)
    if model.family != "recurrent_depth":
        raise ValueError("the model must be of family recurrent_depth")
    split = "tune" if options.tune else "test"
    drawn = of_pointers(options.problems, options.seed, split, NEAREST, options.queries)
    pairs = contestants(options)
    rows = answers(model, pairs, drawn, options)
    places = list(range(len(rows)))
    if options.tune:  # what loses answers is not timed, and the baseline comes first
        places = [i for i in places if rows[i]["keeps_answers"]]
        places.sort(key=lambda i: not rows[i]["baseline"])
    speeds = timed(model, [pairs[i][1] for i in places], drawn, options)
    for i, speed in zip(places, speeds, strict=True):
        rows[i] |= speed_row(speed) | over(speed, speeds[0], "speedup")
    result = choice(rows) if options.tune else summary(rows, speeds)
    for line in (*map(shown, rows), *(f"{name}: {value}" for name, value in result.items())):
        print(line)
    record = options.facts()
    dtypes = facts.dtypes(model.params)
    write_record(record["out"], record, {**result, "rows": rows}, dtypes=dtypes)
    print(f"written: {record['out']}")


if __name__ == "__main__":
    run(main)
