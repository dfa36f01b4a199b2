"""Times the same decoders of two checkouts in alternation.

`python -m experiments.systems.checkouts OLD_ROOT NEW_ROOT`. The speed of a machine drifts by more
than what is asked, so one run of each says little. Here each checkout has a process of its own, of
which only one ever works, and they take turns: old, new, old, new. A pair of turns gives a ratio of
tokens per second; a row of the result is the median of its ratios between two order statistics,
which ask nothing of their distribution. Both decode the problems of `paradec compare` with every
decoder of its tables:

    python -m experiments.systems.checkouts ../old . --pairs 20 --seconds 0.5 --out checkouts.json

This process draws the problems and hands their texts to both checkouts, each of which must have
`paradec_jax.evaluate.cases`. Parameters are prepared once and not timed.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import tyro
from scipy.stats import binom

PROBLEMS, STEPS, SEED = 1000, (2, 4), 1  # of the README's table


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
      roots: the old checkout and the new one.
      model: names of bundled models; each is decoded with the settings of its family.
      batches: rows of a call, filled with the first problems.
      pairs: turns of each checkout, for each row of the result.
      seconds: least time of a turn, made of as many calls as fit.
      rows: only these rows of each table, counted from 0; all when None.
      dtype: type in which both checkouts load the models; that of their files when None.
      out: where the JSON goes, written anew after each row.
    """

    roots: tyro.conf.Positional[tuple[Path, Path]]
    model: tuple[str, ...] = ("tiny-recurrent-distilled", "tiny-causal", "tiny-jacobi")
    batches: tuple[int, ...] = (1, 16)
    pairs: int = 30
    seconds: float = 0.5
    rows: tuple[int, ...] | None = None
    dtype: str | None = None
    out: Path = Path("experiments/systems/results/checkouts.json")

    def __post_init__(self) -> None:
        for root in self.roots:
            if not (root / "paradec_jax").is_dir():
                raise ValueError(f"{root} is no checkout: it has no folder paradec_jax")
        if (
            min(self.pairs, self.seconds, *self.batches) <= 0
            or max(self.batches, default=0) > PROBLEMS
        ):
            raise ValueError(
                f"pairs, seconds and batches must be above 0, and batches at most {PROBLEMS}"
            )


# One checkout: a process in its folder that answers each line of JSON with another


class Subjects:
    """The decoders of one checkout; nothing of the package is imported before this is made."""

    def __init__(self, name: str, dtype: str | None, texts: Sequence[tuple[str, str]]) -> None:
        import paradec_jax

        found = Path(paradec_jax.__file__).resolve().parents[1]
        if found != Path.cwd().resolve():
            raise ImportError(f"the package of {found} was imported, not that of {Path.cwd()}")
        from paradec_jax.data.problems import Problem
        from paradec_jax.evaluate.cases import prompts_of
        from paradec_jax.evaluate.tables import TABLES

        self.model = paradec_jax.load(name, dtype=dtype)
        self.settings = TABLES[self.model.family]
        self.prompts = prompts_of(self.model, [Problem(*text) for text in texts], SEED, None)

    def dtypes(self) -> list[str]:
        """Of the parameters, as they are."""
        from paradec_jax import facts

        return list(facts.dtypes(self.model.params))

    def choose(self, row: int, batch: int) -> int:
        """Compiles one row at one batch size; returns the tokens that a call generates."""
        import jax

        from paradec_jax.evaluate.cases import case_of

        case = case_of(self.settings[row], self.model, self.prompts.size)
        request = self.prompts.request(range(batch))
        jax.clear_caches()  # programs of earlier rows
        self.call = lambda: jax.block_until_ready(case.run(request))
        self.generated = int(self.call().generated.sum())
        return self.generated

    def turn(self, seconds: float) -> float:
        """Tokens per second of as many calls as `seconds` take."""
        calls, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            self.call()
            calls += 1
        return calls * self.generated / spent


def serve_turns(model: str, dtype: str) -> None:
    """The loop of a worker: texts in, rows and dtypes out, then answers to {"choose": ..} and
    {"turn": seconds}.
    """
    sys.path.insert(0, os.getcwd())
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    subjects = Subjects(model, dtype or None, json.loads(sys.stdin.readline()))
    rows = [{"decoder": setting.name, "label": setting.label()} for setting in subjects.settings]
    print(json.dumps({"rows": rows, "dtypes": subjects.dtypes()}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        reply = (
            subjects.choose(*asked["choose"]) if "choose" in asked else subjects.turn(asked["turn"])
        )
        print(json.dumps(reply), file=answers, flush=True)


# Both checkouts


class Worker:
    """A checkout's process, as the parent sees it: `rows` is its table, `dtypes` those of the
    parameters.
    """

    def __init__(
        self, root: Path, model: str, dtype: str | None, texts: Sequence[tuple[str, str]]
    ) -> None:
        words = [sys.executable, str(Path(__file__).resolve()), "--worker", model, dtype or ""]
        self.process: Any = subprocess.Popen(words, cwd=root, stdin=PIPE, stdout=PIPE, text=True)
        print(json.dumps(texts), file=self.process.stdin, flush=True)
        first = self._answer()
        self.rows, self.dtypes = first["rows"], first["dtypes"]

    def ask(self, **asked: Any) -> Any:
        """The answer to one request; nobody else works meanwhile."""
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")
        return json.loads(line)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Two order statistics around the median and how surely they enclose it: at least 0.95 from 6
    values on.

    The true median lies between the k-th smallest and the k-th greatest of n values unless fewer
    than k fall on one side of it, which has the probability 2 P(Binomial(n, 1/2) < k).
    """
    ordered, count = sorted(values), len(values)
    k = max(int(binom.ppf(0.025, count, 0.5)), 1)
    return ordered[k - 1], ordered[-k], 1 - 2 * float(binom.cdf(k - 1, count, 0.5))


def compare_row(
    workers: Sequence[Worker], row: int, batch: int, options: Options
) -> dict[str, Any]:
    """One setting at one batch size, in alternation. Pairs of values: old, new."""
    tokens = [worker.ask(choose=[row, batch]) for worker in workers]
    turns = [
        [worker.ask(turn=options.seconds) for worker in workers] for _ in range(1 + options.pairs)
    ]
    old, new = zip(*turns[1:], strict=True)  # the first turns warm up
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    *interval, coverage = median_interval(ratios)
    found = {
        "batch": batch,
        "ratio": statistics.median(ratios),
        "interval": interval,
        "coverage": coverage,
    }
    speeds = [statistics.median(old), statistics.median(new)]
    return found | {"tokens": tokens, "tokens_per_second": speeds, "ratios": ratios}


def rows_of(model: str, options: Options) -> Iterator[dict[str, Any]]:
    """The rows of one model's table at every batch size, each when it is done."""
    # Not at the top: a worker runs this file too, and must find the package of its own checkout.
    from experiments.tasks import word_problems

    texts = [
        (item.prompt, item.solution) for item in word_problems(PROBLEMS, seed=SEED, steps=STEPS)
    ]
    workers: list[Worker] = []
    try:
        for root in options.roots:
            workers.append(Worker(root, model, options.dtype, texts))
        old, new = (worker.rows for worker in workers)
        if [row["decoder"] for row in old] != [row["decoder"] for row in new]:
            raise ValueError(f"the tables of {model} have other rows: {old} and {new}")
        for row in range(len(old)) if options.rows is None else options.rows:
            for batch in options.batches:
                dtypes = {"dtypes": [worker.dtypes for worker in workers]}
                yield (
                    {"model": model} | new[row] | dtypes | compare_row(workers, row, batch, options)
                )
    finally:
        for worker in workers:
            worker.process.communicate()  # closes its input, which ends it


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints each row and writes the result."""
    from experiments.common.record import write_record  # as above
    from experiments.systems.machine import in_words
    from paradec_jax import facts

    commits = [facts.commit(root) for root in options.roots]
    rows: list[dict[str, Any]] = []
    for model in options.model:
        for row in rows_of(model, options):
            rows.append(row)
            (low, high), (old, new) = row["interval"], row["tokens_per_second"]
            print(
                f"{model:25s} {row['decoder']:15s} {row['label']:55s} batch {row['batch']:3d}  {old:7.0f} > "
                f"{new:7.0f} tokens/s  {row['ratio']:.3f} [{low:.3f}, {high:.3f}]  tokens {row['tokens']}",
                flush=True,
            )
            mean = statistics.geometric_mean(row["ratio"] for row in rows)
            result = {"commits": commits, "geometric_mean": mean, "rows": rows}
            dtypes = [dtype for of in rows for each in of["dtypes"] for dtype in each]
            write_record(options.out, options, result, dtypes=dtypes)
    print(f"geometric mean of {len(rows)} rows {mean:.4f}, {in_words(facts.facts())}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve_turns(*sys.argv[2:])
    else:
        try:
            tyro.cli(main)
        except (ValueError, RuntimeError, OSError) as error:
            raise SystemExit(str(error)) from None
