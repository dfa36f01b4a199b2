"""Causal models side by side on the same unseen problems.

For tables 3 and 4 of Jacobi Forcing (Hu et al. 2025, arXiv 2512.14681), whose rows differ in how a
model was
distilled: the first model is the one that the others are paired with. Every decoder here keeps a
  model's
answers, so exact answers belong to the model, tokens a network call to model and decoder:

    python -m experiments.jacobi.side_by_side tiny-causal runs/mask-nc/model runs/mask-clean/model
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.jacobi.study import compared
from experiments.tasks import word_problems
from paradec_jax import AutoRegressive, load
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.intervals import paired
from paradec_jax.store import names_of


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
      models: model folders or names of bundled models, the one that the others are paired with
        first.
      calls: whether Jacobi decoders run too; without them only answers are compared.
      block: n, tokens of a block at inference.
      problems: unseen problems.
      steps: fewest and most written steps of a problem.
      budget: new tokens of a problem; room for the longest reference solution when None.
      seed: of the problems.
      rows: problems decoded together.
      out: where the JSON goes.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    calls: bool = True
    block: int = 16
    problems: int = 500
    steps: tuple[int, int] = (2, 8)
    budget: int | None = None
    seed: int = 2
    rows: int = 50
    out: Path = Path("experiments/jacobi/results/side_by_side.json")


def evaluate(options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each model and decoder, and the dtypes of the models' parameters."""
    if len(set(options.models)) < len(options.models) or not options.models:
        raise ValueError(
            f"models must be at least one, each of them once, not {list(options.models)}"
        )
    problems = word_problems(options.problems, seed=options.seed, steps=options.steps)
    settings = [Setting("autoregressive", AutoRegressive(), baseline=True)]
    if options.calls:
        settings += compared(options.block)
    loaded = [load(name) for name in options.models]
    for name, model in zip(options.models, loaded, strict=True):
        if model.family != "causal":
            raise ValueError(
                f"{name} is of family {model.family}; Jacobi decoding needs a causal model"
            )
    rows, dtypes, first = [], [], None
    for name, model in zip(names_of(options.models), loaded, strict=True):
        result = compare(
            [Source(name, model, setting) for setting in settings],
            problems,
            seed=options.seed,
            budget=options.budget,
            timed=0,
            rows=options.rows,
        )
        first = result.exact if first is None else first
        dtypes += result.facts["dtypes"]
        for row, exact, other in zip(result.rows, result.exact, first, strict=True):
            pair = paired(exact, other)
            fields = {key: value for key, value in row.items() if key not in RENAMED}
            rows.append(
                {
                    **fields,
                    "label": f"{row['decoder']}, {row['label']}".removesuffix(", "),
                    "difference": pair.difference,
                    "difference_interval": list(pair.interval),
                    "only_here_exact": pair.only_first,
                    "only_first_model_exact": pair.only_second,
                    "p_value": pair.p_value,
                }
            )
    return rows, dtypes


# `compare` pairs a decoder with autoregressive decoding of the same model; here a model is paired
# with the first one.
RENAMED = ("difference", "difference_interval", "only_here_exact", "only_baseline_exact")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    rows, dtypes = evaluate(options)
    for row in rows:
        low, high = (100 * end for end in row["difference_interval"])
        print(
            f"{row['model']:24s} {row['label']:42s} exact {row['exact']:4d}/{row['problems']}  "
            f"{100 * row['difference']:+5.1f} points ({low:+.1f} to {high:+.1f})  "
            f"{row['tokens_per_network_call']:.2f} tokens a call  {row['network_calls_per_token']:.2f} calls a token"
        )
    record = {**dataclasses.asdict(options), "models": names_of(options.models)}
    write_record(options.out, record, {"rows": rows}, dtypes=dtypes)


if __name__ == "__main__":
    run(main)
