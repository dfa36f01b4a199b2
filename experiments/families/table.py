"""One table over all families: the same word problems, one process, one timer.

    python -m experiments.families.table --tune
    python -m experiments.families.table --problems 1000

With `--tune` every setting of every method is tried on tuning problems. Without it one setting of
each method answers unseen problems: of those that were tried the fastest among those that lose at
most one right answer of a hundred against the method's best. All rows are
compared with `tiny-causal` one by one, on the same problems, and are timed in turns with it. A line
a row goes to standard error. A command that was stopped goes on with the rows that are missing.

AUP (d3LLM) is over the settings that were tried, from points (rho tokens a call, y right answers of
a hundred) in the order of rho, without those of y < y_1 - 5::

    AUP = rho_1 y_1 + sum_i (rho_i - rho_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2
    W(y) = exp(-3 (1 - y / y_max))                y_max, the largest of all methods
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tyro.conf import OmitArgPrefixes

from experiments.common.command import run as run_command
from experiments.common.plots import if_possible, picture
from experiments.common.record import write_record
from paradec_jax import load
from paradec_jax.cli import answers
from paradec_jax.cli.compare import ACROSS, SEVERAL
from paradec_jax.cli.output import print_table
from paradec_jax.families import choose

# A model, its minutes of training after those of the models that it begins with or learns from, and
# the recipe that trains it where a checkout has no weights of it.
MODELS = """
tiny-causal | 54 |
tiny-jacobi | 54 + 41 |
cllm | 54 + 38 | jacobi.sh cllm
tiny-recurrent | 91 |
tiny-recurrent-distilled | 91 + 54 + 41 + 47 |
tiny-sdar | |
tiny-llada | | blocks.sh tiny-llada
"""
# Models, method, what its texts equal by proof, and its settings: braces list alternatives. The
# first method of a model is the one by one of it.
METHODS = """
tiny-causal tiny-jacobi cllm | one by one | | autoregressive
tiny-causal | prompt lookup | one by one | prompt_lookup --min-ngram {1,3} --num-pred {2,4,8,16}
tiny-causal | lookahead | one by one | lookahead --level {3,5} --window {3,7} --guesses {3,7}
tiny-causal | drafts by masks | one by one | drafted --places {1,2,4}
tiny-jacobi cllm | Jacobi, blocks | one by one | jacobi --block {4,8,16,32} --pool {0,4}
tiny-jacobi cllm | Jacobi, running | one by one | jacobi --running --block {6,8,12,16} --candidates {1,2}
tiny-jacobi cllm | Jacobi, two blocks | one by one | multiblock --block {8,16} --spawn {0,0.5} --pool {0,4}
tiny-recurrent tiny-recurrent-distilled | 16 recurrences | | autoregressive --recurrence 16
tiny-recurrent tiny-recurrent-distilled | 1 recurrence | | autoregressive --recurrence 1
tiny-recurrent tiny-recurrent-distilled | 2 recurrences | | autoregressive --recurrence 2
tiny-recurrent | wavefront | | WAVE {1,2} --window {3,8} --prefill-recurrence 4 --exit-threshold {0.1,0.4}
tiny-recurrent-distilled | adaptive | | adaptive --prefill-recurrence {1,4} --exit-threshold {0.1,0.2,0.4,0.8}
tiny-recurrent-distilled | own drafts | | speculative --recurrence {2,4} --draft-recurrence 1 --lookahead {2,4,6,8}
tiny-recurrent-distilled | Jacobi, blocks | its recurrences | jacobi --recurrence {1,2} --block {4,8,12,16}
tiny-recurrent-distilled | Jacobi, running | its recurrences | jacobi --running --recurrence {1,2} --block {4,6,8,12}
tiny-recurrent-distilled | wavefront | | WAVE 1 --window {2,3} --prefill-recurrence {1,4} --exit-threshold {0.1,0.4}
tiny-recurrent-distilled | wavefront, headway | | WAVE {1,2} HEADWAY --no-warm-start --exit-threshold inf
tiny-sdar | one a step | | block --rule static
tiny-sdar | two a step | | block --rule static --steps 4
tiny-sdar | four a step | | block --rule static --steps 2
tiny-sdar | dynamic | | block --threshold {0.7,0.8,0.9,0.95,0.98,0.99,0.995,0.999}
tiny-sdar | factor | | block --rule factor --factor {0.02,0.05,0.1,0.2,0.3,0.5,0.8,1}
tiny-sdar | entropy | | block --rule entropy --entropy {0.01,0.03,0.1,0.2,0.3,0.5}
tiny-sdar | self-verified | | self_verified --route {span,score}
tiny-sdar | in flight | | in_flight --flight {2,4} SURE
tiny-sdar | MRP direct 1, zero head | | residual --head zero SURE
tiny-sdar | MRP direct 1 | | residual SURE
tiny-sdar | MRP direct 2, zero head | | residual --head zero --head-steps 2 SURE
tiny-sdar | MRP direct 2 | | residual --head-steps 2 SURE
tiny-sdar | MRP speculative 3, zero head | dynamic | residual_speculative --head zero SURE
tiny-sdar | MRP speculative 3 | dynamic | residual_speculative SURE
tiny-llada | one a call | | semi_autoregressive --rule static
tiny-llada | threshold | | semi_autoregressive SURE
tiny-llada | Dream entropy | | semi_autoregressive --order entropy --rule static --steps {32,16,8}
tiny-llada | prefix cache | | semi_autoregressive --cache prefix SURE
tiny-llada | dual cache | | semi_autoregressive --cache dual SURE
tiny-llada | D2F | | in_flight --flight {2,4} SURE
tiny-llada | WINO | | wino --length 32 --threshold {0.5,0.6,0.7,0.8}
tiny-llada | Prophet | | prophet --length 32
tiny-llada | SSD | one a call | speculative --tries {2,4,8}
"""
WORDS = {  # that stand for options
    "WAVE": "wavefront --momentum 0 --inner-recurrence",
    "HEADWAY": "--window {6 --headway 6,8 --headway 8,12 --headway 12} --prefill-recurrence 1",
    "SURE": "--threshold {0.9,0.98,0.99,0.999}",
}
COLUMNS = ACROSS | {"model": "{method}", "AUP": "{aup:.0f}"}
# Fields of the records: of a setting that was tried, of a timing of several problems, of the table.
TRIED = "model method words exact problems tokens_per_network_call speedup"
SPEED = "batch tokens tokens_per_second quickest_seconds slowest_seconds speedup speedup_interval"
SHOWN = """
    family model parameters minutes method words label baseline exact problems interval difference
    difference_interval equals_greedy equal_to tokens_per_network_call network_calls_per_token
    recurrences_per_token head_calls_per_token positions_per_token flops_per_token megabytes tokens
    tokens_per_second quickest_seconds slowest_seconds speedup speedup_interval wide aup
"""
PICTURES = {  # titles of panels, by what they show of a row
    "table-speed": {
        "{speedup}": "tokens a second over the baseline's, one problem at a time",
        "{wide[speedup]}": "the same, 16 problems together",
    },
    "table-calls": {"{tokens_per_network_call}": "tokens a network call"},
}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      tune: whether settings are tried; else those that are chosen are measured.
      problems: tuning or unseen problems, the first of the package's.
      models: models of the table; all of them by default.
      runs: folder of models that were trained, RUNS/NAME/model, and of rows that are made.
      folder: where tables go; pictures go to `figures` beside it.
    """

    tune: bool = False
    problems: int = 100
    models: tuple[str, ...] = ()
    runs: Path = Path("runs")
    folder: Path = Path("experiments/families/results")


def cells(text: str) -> list[list[str]]:
    """The lines of a table."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def expanded(words: str) -> list[str]:
    """The settings that a line with alternatives stands for."""
    for name, meaning in WORDS.items():
        words = words.replace(name, meaning)
    parts = [part.split(",") for part in re.split("[{}]", words)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def aup(points: Sequence[tuple[float, float]], most: float) -> float:
    """Accuracy under parallelism of points (tokens a call, right answers of a hundred)."""
    points = sorted(points)
    rho, first = points[0]
    kept = [(x, y * math.exp(-3 * (1 - y / most))) for x, y in points if y >= first - 5]
    return rho * first + sum((c - a) * (b + d) / 2 for (a, b), (c, d) in itertools.pairwise(kept))


def some(row: Row, fields: str) -> Row:
    """A row with these fields alone."""
    return {name: row[name] for name in fields.split()}


def hundred(row: Row) -> float:
    """Right answers of a hundred."""
    return 100 * row["exact"] / row["problems"]


def best_of(rows: Sequence[Row]) -> Row:
    """The setting of a method that is chosen."""
    least = max(map(hundred, rows)) - 1
    return max(rows, key=lambda row: (hundred(row) >= least, row["speedup"]))


def measured(options: Options, wanted: Mapping[str, Any], places: Mapping[str, str]) -> list[Row]:
    """A row a setting, with its method; none where it asks a part that the model lacks.

    Args:
      options: problems, their number, and folders of models and rows.
      wanted: model and settings of each method.
      places: where each model lies.
    """
    drafts = options.runs / "tiny-drafts" / "adapter"  # which leave their model as it is
    models = {
        name: load(place, adapter=drafts if name == "tiny-causal" and drafts.is_dir() else None)
        for name, place in places.items()
    }
    tables: dict[str, list[Any]] = {name: [] for name in models}
    named: dict[Any, Row] = {}
    for method, (name, words) in wanted.items():
        for word in words:
            chosen = choose(models[name].family, word)
            tables[name].append(dataclasses.replace(chosen, baseline=not tables[name]))
            key = name, chosen.name, chosen.label()
            named.setdefault(key, {"method": method, "words": word})
    kind = "tuning" if options.tune else "unseen"
    options.runs.mkdir(exist_ok=True)
    asked = answers.Options(
        data=kind,
        problems=options.problems,
        wide=None if options.tune else 16,
        json=str(options.runs / f"families-{kind}.json"),
    )
    rows = itertools.chain(*answers.answers(asked, places, models, tables))
    return [row | named[row["model"], row["decoder"], row["label"]] for row in rows]


def draw(rows: Sequence[Row], panels: Mapping[str, str], path: Path) -> None:
    """Right answers over a figure of each row, a panel a figure: a colour a model, a number a method."""
    from matplotlib.ticker import LogLocator

    models = [*dict.fromkeys(row["model"] for row in rows)]
    with picture(path, (11, 5.4)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (field, title) in zip(axes, panels.items(), strict=True):
            for i, row in enumerate(rows):
                axis.scatter(
                    float(field.format(**row)),
                    hundred(row),
                    label=row["method"],
                    color=f"C{models.index(row['model'])}",
                    marker=f"${i}$",
                )
            axis.set(xlabel=title, xscale="log", ylabel="right answers of a hundred")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=6)


def main(options: OmitArgPrefixes[Options]) -> None:
    """Measures, prints, writes and draws the table."""
    absent, places, minutes = {}, {}, {}
    for name, minutes[name], recipe in cells(MODELS):
        place = options.runs / name / "model"
        if recipe and not place.is_dir():
            absent[name] = "no model, which a recipe trains: " + recipe
        elif not options.models or name in options.models:
            places[name] = str(place) if recipe else name
    wanted, equal = {}, {}
    tried: dict[str, list[Row]] = {}
    for names, method, same, words in cells(METHODS):
        for name in names.split():
            if name in places:
                key = f"{name}: {method}"
                wanted[key], equal[key] = (name, expanded(words)), same
    path = options.folder / "table-tuning.json"
    if not options.tune:
        for row in json.loads(path.read_text())["rows"]:
            tried.setdefault(row["method"], []).append(row)
        wanted = {
            method: (of[0]["model"], [best_of(of)["words"]])
            for method, of in tried.items()
            if method in wanted
        }
        path = options.folder / "table.json"
    rows = measured(options, wanted, places)
    none = equal.keys() - {row["method"] for row in rows}
    absent |= dict.fromkeys(none, "not tried, or the model lacks a part that it asks")
    most = max(map(hundred, itertools.chain(rows, *tried.values())))
    for row in rows:
        method, of = row["method"], tried.get(row["method"], ())
        points = [(one["tokens_per_network_call"], hundred(one)) for one in of]
        row |= {
            "minutes": minutes[row["model"]],
            "equal_to": equal[method],
            "wide": row["wide"] and some(row["wide"], SPEED),
            "aup": aup(points, most) if len(points) > 2 else None,
        }
    print_table(SEVERAL, COLUMNS, rows, [f"absent: {name}: {why}" for name, why in absent.items()])
    kept = [some(row, TRIED if options.tune else SHOWN) for row in rows]
    write_record(path, options, {"absent": absent, "rows": kept})
    if not options.tune:
        for name, panels in PICTURES.items():
            if_possible(draw, rows, panels, options.folder.parent / "figures" / f"{name}.png")


if __name__ == "__main__":
    run_command(main)
