"""A queue of prompts against fixed batches of them. `python -m experiments.systems.refill`.

Unseen problems whose answers differ in length go through each decoder in three ways:

| way   | programs                             | a row that has stopped                 |
|-------|--------------------------------------|----------------------------------------|
| run   | `run`, one call a batch              | waits for the slowest row of its batch |
| fixed | `stream`, which are those of `serve` | waits for the slowest row of its batch |
| queue | `serve`                              | takes the next problem                 |

`fixed` against `queue` shows what refilling is worth, since both call the same two compiled programs and look
which rows have stopped equally often. `run` with one row is every problem decoded alone: the rate that others
are measured by, and the answers that theirs must equal. All ways take turns; the range of a ratio is a bootstrap over
passes.
"""

import collections
import dataclasses
import functools
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.common.record import write_record
from paradec_jax import Decoded, Request, Static, facts, load, make_request, run, serve, stream
from paradec_jax.data.batches import encode_prompts
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import word_problems
from paradec_jax.evaluate.intervals import ends, quicker, times
from paradec_jax.families import FAMILIES
from paradec_jax.timing import Case

CHOSEN = (
    Setting("autoregressive", Static(recurrence=16)),
    Setting("autoregressive", Static(recurrence=2)),
    next(s for s in reversed(FAMILIES["recurrent_depth"].settings) if s.name == "wavefront"),
)
WAYS = {  # colour and meaning in the plot
    "run": ("#0072B2", "fixed batches, one call each"),
    "fixed": ("#E69F00", "fixed batches, looked at"),
    "queue": ("#009E73", "queue"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      problems: unseen problems.
      steps: fewest and most steps of a problem; the further apart, the more unequal the answers.
      rows: rows of the running batch.
      every: steps between two looks at which rows have stopped.
      max_new_tokens: budget of a row.
      passes: timings of each way, of which the median counts.
      seed: of problems and initial states.
      out: where the JSON goes; a CSV of the same name lies beside it.
      figure: where the plot goes.
    """

    model: str = "tiny-recurrent"
    problems: int = 200
    steps: tuple[int, int] = (2, 8)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    every: int = 16
    max_new_tokens: int = 192
    passes: int = 3
    seed: int = 1
    out: Path = Path("experiments/systems/results/refill.json")
    figure: Path = Path("experiments/systems/figures/refill.png")


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A fixed batch: the request, and how many of its rows are problems; the others repeat the last one."""

    request: Request
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What a batch or the whole queue came to: results, how many rows of them are problems, steps.

    The steps of a batch are the network calls of its slowest row, the one that read the prompt left out.
    """

    decoded: Decoded
    count: int
    queue_steps: int | None = None

    @property
    def steps(self) -> int:
        """Steps of the decoder, over all rows at once."""
        return int(np.max(self.decoded.network_calls)) - 1 if self.queue_steps is None else self.queue_steps


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """One way through all problems: its name, its rows, and a function that goes it once, in their order."""

    name: str
    rows: int
    go: Callable[[], list[Part]]


def batches(everything: Callable[[Any], Request], count: int, rows: int) -> list[Batch]:
    """All problems in batches of one shape."""
    result = []
    for start in range(0, count, rows):
        at = np.arange(start, min(start + rows, count))
        filled = np.concatenate([at, np.repeat(at[-1:], rows - len(at))])
        result.append(Batch(everything(filled), len(at)))
    return result


def by_run(case: Case, params: Any, groups: Sequence[Batch]) -> list[Part]:
    """Each batch in one call of `run`."""
    parts = []
    for group in groups:
        decoded = jax.block_until_ready(run(case.decoder, params, group.request, case.knobs))
        parts.append(Part(decoded, group.count))
    return parts


def by_stream(case: Case, params: Any, groups: Sequence[Batch], every: int) -> list[Part]:
    """Each batch with a look after every few steps, as `serve` does it, but without refilling."""
    parts = []
    for group in groups:
        *_, (last, _) = stream(case.decoder, params, group.request, case.knobs, every=every)
        parts.append(Part(jax.block_until_ready(case.decoder.finish(last)), group.count))
    return parts


def by_serve(case: Case, params: Any, whole: Batch, rows: int, every: int) -> list[Part]:
    """All problems through one queue."""
    served = serve(case.decoder, params, whole.request, case.knobs, rows=rows, every=every)
    return [Part(served.decoded, whole.count, served.steps)]


def ways(case: Case, params: Any, everything: Callable[[Any], Request], options: Options) -> list[Way]:
    """All ways of one decoder; the first is every problem alone."""
    whole = Batch(everything(np.arange(options.problems)), options.problems)
    found = []
    for rows in sorted({1, *options.rows}):
        groups = batches(everything, options.problems, rows)
        found.append(Way("run", rows, functools.partial(by_run, case, params, groups)))
        if rows in options.rows:
            fixed = functools.partial(by_stream, case, params, groups, options.every)
            queue = functools.partial(by_serve, case, params, whole, rows, options.every)
            found += [Way("fixed", rows, fixed), Way("queue", rows, queue)]
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """What came back: each problem's prompt, completion and network calls, and the steps of all together."""

    prompts: list[tuple[int, ...]]
    completions: list[list[int]]
    calls: int
    steps: int


def answers(parts: Sequence[Part]) -> Answers:
    """Reads results, without the rows that only fill a batch."""
    prompts, completions, calls = [], [], 0
    for part in parts:
        rows = zip(np.asarray(part.decoded.tokens), np.asarray(part.decoded.prompt_lengths), strict=True)
        prompts += [tuple(row[:end].tolist()) for row, end in rows][: part.count]
        completions += part.decoded.completions()[: part.count]
        calls += int(np.sum(part.decoded.network_calls[: part.count]))
    return Answers(prompts, completions, calls, sum(part.steps for part in parts))


def describe(way: Way, found: Answers, alone: Answers, first: float, seconds: Sequence[float]) -> dict:
    """One row of the table.

    A problem is known by its prompt: it is lost when fewer answers carry it than were asked for, doubled when
    more do. A changed answer is not the one that the problem gets alone. Occupancy is the share of row-steps in
    which a problem was decoded, for decoders with one network call a step. What the first pass took longer than
    the median one is compilation.
    """
    asked, got = collections.Counter(alone.prompts), collections.Counter(found.prompts)
    tokens = sum(map(len, found.completions))
    median = statistics.median(seconds)
    return {
        "way": way.name,
        "rows": way.rows,
        "problems": len(alone.prompts),
        "lost": (asked - got).total(),
        "doubled": (got - asked).total(),
        "changed": sum(a != b for a, b in zip(found.completions, alone.completions, strict=False)),
        "tokens": tokens,
        "steps": found.steps,
        "occupancy": (found.calls - len(found.prompts)) / max(found.steps * way.rows, 1),
        "seconds": median,
        "passes": list(seconds),
        "quickest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "tokens_per_second": tokens / median,
        "compile_seconds": max(first - median, 0.0),
    }


def compare_rates(rows: list[dict]) -> None:
    """Adds to each row its rate against problems one by one and the fixed batches of its size, with ranges."""
    found = {(row["way"], row["rows"]): row for row in rows}
    for row in rows:
        against = {"one_by_one": ("run", 1), "run": ("run", row["rows"]), "fixed": ("fixed", row["rows"])}
        for name, base in against.items():
            row |= {f"against_{name}": None, f"against_{name}_interval": [None, None]}
            if (other := found.get(base)) is not None:
                of = quicker(row["passes"], other["passes"], row["tokens"], other["tokens"])
                row |= {f"against_{name}": of[0], f"against_{name}_interval": ends(of[1])}


def measure(found: Sequence[Way], passes: int, advance: Callable[[str], None]) -> list[dict]:
    """Goes every way once to compile and warm up, then all of them in turns, `passes` times."""

    def timed(way: Way) -> tuple[float, list[Part]]:
        start = time.perf_counter()
        parts = way.go()
        seconds = time.perf_counter() - start
        advance(f"{way.name}, {way.rows} rows")
        return seconds, parts

    first = [timed(way)[0] for way in found]
    turns = [[timed(way) for way in found] for _ in range(passes)]
    last = [answers(parts) for _, parts in turns[-1]]
    table = [
        describe(way, last[i], last[0], first[i], [turn[i][0] for turn in turns])
        for i, way in enumerate(found)
    ]
    compare_rates(table)
    return table


def plot(rows: Sequence[dict], path: Path) -> None:
    """Throughput and occupancy against rows, a column for each decoder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, axes = plt.subplots(2, len(labels), figsize=(4.2 * len(labels), 6), sharex=True, squeeze=False)
    for label, (upper, lower) in zip(labels, axes.T, strict=True):
        for way, (colour, meaning) in WAYS.items():
            line = [row for row in rows if row["label"] == label and row["way"] == way]
            sizes = [row["rows"] for row in line]
            upper.plot(
                sizes, [row["tokens_per_second"] for row in line], "o-", ms=4, color=colour, label=meaning
            )
            if way != "run":  # the rows of a fixed batch are at work equally long either way
                lower.plot(sizes, [100 * row["occupancy"] for row in line], "o-", ms=4, color=colour)
        alone = next(row for row in rows if row["label"] == label and row["rows"] == 1)
        upper.axhline(alone["tokens_per_second"], color="grey", ls=":", label="one by one")
        title = label.replace(" ", "\u00a0").replace(",\u00a0", ", ")  # lines break after commas alone
        upper.set_title("\n".join(textwrap.wrap(title, 40)), fontsize=10)
        upper.set_ylim(bottom=0)
        lower.set_ylim(0, 105)
        lower.set_xscale("log", base=2)
        ticks = sorted({row["rows"] for row in rows})
        lower.set_xticks(ticks, [str(tick) for tick in ticks])
        lower.set_xlabel("rows")
        for axis in (upper, lower):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("tokens a second")
    axes[1, 0].set_ylabel("rows at work [%]")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table; fails if any answer was lost, doubled or changed."""
    if min((*options.rows, options.problems, options.every, options.passes, options.max_new_tokens)) < 1:
        raise SystemExit("problems, rows, every, passes and max-new-tokens must be at least 1")
    if max(options.rows) > options.problems:
        raise SystemExit(f"rows {options.rows} must not exceed the {options.problems} problems")
    model = load(options.model)
    assert model.tokenizer is not None
    problems = word_problems(options.problems, seed=options.seed, steps=options.steps)
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), np.arange(len(problems)))

    def everything(at: Any) -> Request:
        budget, stop = options.max_new_tokens, model.token_spec.stop
        return make_request(tokens[at], lengths[at], max_new_tokens=budget, stop=stop, keys=keys[at])

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for setting in CHOSEN:
            decoder = dataclasses.replace(setting.decoder, greedy=True)
            decoder = decoder.bind(model.network, tokens.shape[1] + options.max_new_tokens, model.token_spec)
            params = decoder.prepare(model.params)
            found = ways(Case(decoder, setting.knobs), params, everything, options)
            label = f"{setting.name}, {setting.label()}"
            task = progress.add_task(label, total=len(found) * (options.passes + 1))

            def advance(text: str, task: Any = task, label: str = label) -> None:
                progress.update(task, advance=1, description=f"{label}: {text}")

            table = measure(found, options.passes, advance)
            rows += [
                {"decoder": setting.name, "label": label, "settings": setting.settings()} | row
                for row in table
            ]
    for row in rows:
        print(
            f"{row['label'][:44]:44s}  {row['way']:5s}  rows {row['rows']:2d}  "
            f"{row['tokens_per_second']:7.0f} tokens/s  "
            f"{times(row['against_one_by_one'], row['against_one_by_one_interval'])} of one by one  "
            f"at work {row['occupancy']:4.0%}  {row['steps']:6d} steps  "
            f"lost {row['lost']}, doubled {row['doubled']}, changed {row['changed']}"
        )
    write_record(options.out, options, {"rows": rows}, dtypes=facts.dtypes(model.params), lines=rows)
    plot(rows, options.figure)
    wrong = sum(row["lost"] + row["doubled"] + row["changed"] for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} answers were lost, doubled or changed: see {options.out}")


if __name__ == "__main__":
    tyro.cli(main)
