"""Block length as a dial: one checkpoint decoded at each length of its training, and at lengths chosen by entropy.

`python -m experiments.block_diffusion.block_length --model runs/lengths/model` (of
`python -m experiments.block_diffusion.train lengths`). At every length one token a step and SDAR's dynamic rule at
some thresholds, then the same thresholds with lengths chosen block by block. Thresholds and entropies are chosen on
tuning problems by their utility, exact answers less a price of network calls; what was chosen is measured on unseen
problems of another seed, all compared with one token a step at the checkpoint's own length.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.common.candidates import best_of
from experiments.common.command import run
from experiments.common.record import write_record
from experiments.decoders.elastic import ElasticDenoising
from experiments.tasks import word_problems
from paradec_jax import BlockDenoising, Model, facts, load
from paradec_jax.decode.block.canvas import lengths_of
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import compare, wilson


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled model whose training mixed lengths.
      thresholds: of the dynamic rule.
      entropies: nats a masked position that blocks may have where they could be shorter.
      call_price: share of exact answers that one more network call a token is worth, in the choice.
      problem_steps: fewest and most steps of a problem's solution.
      tuning: tuning problems.
      problems: unseen problems.
      timed: unseen problems decoded one by one for speed; 0 leaves speed out.
      seed: of the tuning problems; unseen problems are drawn from seed + 1.
      out: where the JSON goes.
    """

    model: str
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)
    entropies: tuple[float, ...] = (0.1, 0.3, 1.0)
    call_price: float = 0.1
    problem_steps: tuple[int, int] = (2, 4)
    tuning: int = 200
    problems: int = 1000
    timed: int = 0
    seed: int = 0
    out: Path = Path("experiments/block_diffusion/results/block_length.json")

    def __post_init__(self) -> None:
        if not self.thresholds or not self.entropies:
            raise ValueError("thresholds and entropies must each be at least one number")


Rows = list[tuple[str, Setting]]  # settings, each with the group of which one is chosen


def settings(model: Model, options: Options) -> Rows:
    """One token a step and the dynamic rule at each length, then lengths by entropy."""
    own, found = model.network.block, Rows()
    static = {length: BlockDenoising(length=length, rule="static") for length in lengths_of(model.network)}
    for length in sorted(static, key=lambda length: length != own):  # the checkpoint's own is the baseline
        name = f"length {length}, one a step"
        found.append((name, Setting(name, static[length], baseline=length == own)))
    for threshold in options.thresholds:
        for length in static:
            decoder = BlockDenoising(length=length)
            knobs = decoder.Knobs(threshold=threshold)
            found.append((f"length {length}, dynamic", Setting(told(length, threshold), decoder, knobs)))
        for entropy in options.entropies:
            elastic = ElasticDenoising()
            more = elastic.Knobs(threshold=threshold, length_entropy=entropy)
            found.append(
                ("by entropy, dynamic", Setting(told(f"to {entropy} nats", threshold), elastic, more))
            )
    return found


def told(length: int | str, threshold: float) -> str:
    """A setting's name."""
    return f"length {length}, threshold {threshold}"


def measure(
    model: Model, options: Options, of: Sequence[Setting], split: str, count: int
) -> list[dict[str, Any]]:
    """A row for each setting."""
    seed = options.seed + (split == "test")
    problems = word_problems(count, seed=seed, steps=options.problem_steps, split=split)
    timed = min(options.timed, count) if split == "test" else 0
    return compare(model, problems, of, seed=seed, timed=timed).rows


def chosen(named: Rows, rows: Sequence[dict[str, Any]], call_price: float) -> list[Setting]:
    """Of each group the setting of greatest utility."""
    best = best_of([group for group, _ in named], rows, call_price)
    return [named[i][1] for i, _ in best.values()]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Chooses on tuning problems, measures on unseen ones; prints and writes both tables."""
    model = load(options.model)
    if model.family != "block_diffusion" or len(lengths_of(model.network)) < 2:
        raise ValueError(
            f"model must be one of block diffusion whose training mixed lengths of blocks, not {options.model}"
        )
    named = settings(model, options)
    tuned = measure(model, options, [setting for _, setting in named], "tune", options.tuning)
    rows = measure(model, options, chosen(named, tuned, options.call_price), "test", options.problems)
    for row in rows:
        low, high = wilson(row["exact"], row["problems"])
        print(
            f"{row['decoder']:36s} exact {row['exact']}/{row['problems']} [{low:.1%}, {high:.1%}]  "
            f"calls/token {row['network_calls_per_token']:.3f}"
        )
    write_record(options.out, options, {"rows": rows, "tuned": tuned}, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run(main)
