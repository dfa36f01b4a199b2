"""Seconds of an update of the recipes and of changed ones: `python -m experiments.masked_diffusion.step_cost`.

To be run before a training, on a machine that does nothing else: it tells how many updates fit into the minutes of a
run, and which precision and shape the machine likes. All take their turn in every pass; text and weights are random.

    python -m experiments.masked_diffusion.step_cost tiny-mdlm bfloat16 rows-8 rows-32 halves
"""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common import precision
from experiments.common.command import run
from experiments.common.record import write_record
from experiments.masked_diffusion import distill
from experiments.masked_diffusion.train import RECIPES, Recipe, objective, optimizer_of, shape_of
from experiments.systems.report import Clock, in_turns
from paradec_jax import facts
from paradec_jax.config import MaskedDiffusionConfig, TokenSpec
from paradec_jax.data.text import batch_of
from paradec_jax.families import init_params, network_of
from paradec_jax.train import TrainState, make_train_step

BACKWARD = 2  # times the operations of a forward pass

# What differs from the recipe of the denoiser; "layer" is a config's remat.
CHANGES: dict[str, dict[str, Any]] = {
    "float32": {"matmul_precision": "float32"},
    "bfloat16": {"matmul_precision": precision.BFLOAT16},
    "rows-8": {"rows": 8},
    "rows-32": {"rows": 32},
    "length-128": {"length": 128, "rows": 32},
    "heads-2": {"heads": 2},
    "layers-6": {"layers": 6},
    "width-160": {"width": 160, "heads": 5},
    "remat": {"remat": "layer"},
}
DISTILLED = distill.RECIPES["halves"]
CASES = (*RECIPES, DISTILLED.name, *CHANGES)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      cases: recipes of `train`, "halves" for an update of the distillation, and changes of tiny-mdlm's recipe; all of
        them when none is named.
      minutes: of a run, for the number of updates that it has.
      passes: timings of each, of which the median counts.
      vocabulary: characters of the text, the mask included.
      out: where the JSON goes.
    """

    cases: tyro.conf.Positional[tuple[str, ...]] = ()
    minutes: float = 75.0
    passes: int = 5
    vocabulary: int = 66
    out: Path = Path("experiments/masked_diffusion/results/step_cost.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """An update that has been compiled.

    Attributes:
      call: does one and returns its metrics.
      told: what its row says of it.
      dtypes: of its parameters.
    """

    call: Callable[[], Any]
    told: dict[str, Any]
    dtypes: list[str]


def recipe_of(case: str) -> Recipe:
    """The recipe of a case, without its change of `remat`."""
    changes = {name: value for name, value in CHANGES.get(case, {}).items() if name != "remat"}
    if case == DISTILLED.name:
        changes = {"rows": DISTILLED.rows}
    return dataclasses.replace(RECIPES.get(case, RECIPES["tiny-mdlm"]), **changes).settled()


def update_of(case: str, options: Options) -> Update:
    """Compiles the update of a case and does it twice."""
    recipe = recipe_of(case)
    config: Any = shape_of(recipe, options.vocabulary)
    if "remat" in CHANGES.get(case, {}):
        config = dataclasses.replace(config, remat=CHANGES[case]["remat"])
    denoises, last = isinstance(config, MaskedDiffusionConfig), options.vocabulary - 1
    spec = TokenSpec(mask=last, alignment="own") if denoises else TokenSpec(bos=last, pad=last)
    network, params = network_of(config), init_params(config, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, last, (recipe.rows, recipe.length), np.int32)
    batch = batch_of(ids, None if denoises else last)
    teacher: Any = None
    passes = 1 + BACKWARD
    if case == DISTILLED.name:
        loss, optimizer = distill.objective(DISTILLED, network, spec), distill.optimizer_of(DISTILLED)
        teacher, passes, decay = params, passes + DISTILLED.jump, DISTILLED.ema_decay
    else:
        loss, optimizer, decay = (
            objective(recipe, network, spec),
            optimizer_of(recipe, config),
            recipe.ema_decay,
        )
    state = TrainState.create(params, optimizer, jax.random.key(0), ema=True, teacher=teacher)
    step = make_train_step(loss, optimizer, ema_decay=decay)

    def call() -> Any:
        nonlocal state
        with jax.default_matmul_precision(recipe.matmul_precision):
            state, metrics = step(state, None, batch)
        return metrics

    first, second = in_turns({case: call}, Clock(), 2)[case].wall
    told = {
        "case": case,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "rows": recipe.rows,
        "length": recipe.length,
        "matmul_precision": recipe.matmul_precision,
        "flops": passes * network.work(recipe.rows, recipe.length, 0).flops,
        "compile_seconds": max(first - second, 0.0),
    }
    return Update(call, told, facts.dtypes(params))


def row_of(update: Update, seconds: list[float], minutes: float) -> dict[str, Any]:
    """A row of the table."""
    middle, told = statistics.median(seconds), update.told
    size = told["rows"] * told["length"]
    updates = int(60 * minutes / middle)
    return {
        **told,
        "seconds": middle,
        "passes": seconds,
        "characters_per_second": size / middle,
        "flops_per_second": told["flops"] / middle,
        "minutes": minutes,
        "updates_in_minutes": updates,
        "characters_in_minutes": updates * size,
    }


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes a row a case."""
    cases = options.cases or CASES
    if unknown := [case for case in cases if case not in CASES]:
        raise ValueError(f"no case {', '.join(unknown)}: choose of {', '.join(CASES)}")
    if options.passes < 2 or options.minutes <= 0 or options.vocabulary < 2:
        raise ValueError(
            f"passes and vocabulary must be at least 2 and minutes above 0, not {options.passes}, "
            f"{options.vocabulary} and {options.minutes}"
        )
    updates = {case: update_of(case, options) for case in cases}
    seconds = in_turns({case: update.call for case, update in updates.items()}, Clock(), options.passes)
    rows = [row_of(update, list(seconds[case].wall), options.minutes) for case, update in updates.items()]
    for row in rows:
        print(
            f"{row['case']:12s} {row['rows']:3d} x {row['length']}  {row['matmul_precision']:14s} "
            f"{row['seconds']:7.3f} s an update  {row['characters_per_second']:8.0f} characters/s  "
            f"{row['flops_per_second'] / 1e9:6.1f} GFLOP/s  {row['updates_in_minutes']:7d} updates, "
            f"{row['characters_in_minutes'] / 1e6:6.1f} M characters in {row['minutes']:g} minutes"
        )
    dtypes = [dtype for update in updates.values() for dtype in update.dtypes]
    write_record(options.out, options, {"rows": rows}, dtypes=dtypes)


if __name__ == "__main__":
    run(main)
