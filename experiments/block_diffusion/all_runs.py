"""All trainings of block diffusion, one after the other: `python -m experiments.block_diffusion.all_runs`.

Both alignments on word problems at equal updates, a head beside one of them, then the chain language and its head.
Each has its minutes, of which evaluations and checkpoints take a part. The same command goes on where a run stood and
passes over those that are done; a run that its minutes ended ends the command.

    RUNS/NAME          checkpoints, metrics, model, held_out.json
    EXPORT/NAME        models in bfloat16

Names are those of the recipes of `train` and `train_head`; a head is trained beside RUNS/tiny-sdar/model or
RUNS/chains/model, or beside other runs (`--backbones`), which come before it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tyro

from experiments.block_diffusion import train, train_head
from experiments.common.command import claim, run
from experiments.common.processes import alone
from paradec_jax import store

RUNS = ("tiny-sdar", "tiny-sdar-next", "tiny-head", "chains", "chains-head")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train.

    Attributes:
      names: of recipes.
      backbones: runs whose models get the heads, on word problems and on the chain.
      runs: folder of the runs.
      export: folder of copies in half the size; none by default.
      minutes: of each run; the next call goes on.
      steps: updates of each of `names`; those of the recipes when None. A run's `metrics.jsonl` tells its seconds an
        update, and so how many fit into its minutes.
      matmul_precision: of all runs; what suits the device when None.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = RUNS
    backbones: tuple[str, str] = ("tiny-sdar", "chains")
    runs: Path = Path("runs")
    export: Path | None = None
    minutes: float = 75.0
    steps: tuple[int, ...] | None = None
    matmul_precision: str | None = None

    def __post_init__(self) -> None:
        known = (*train.RECIPES, *train_head.RECIPES)
        if unknown := [name for name in self.names if name not in known]:
            raise ValueError(f"no recipe {', '.join(unknown)}: choose of {', '.join(known)}")
        if self.steps is not None and len(self.steps) != len(self.names):
            raise ValueError(f"steps must be one number for each of {len(self.names)} runs, not {self.steps}")


def recipes(options: Options) -> list[Any]:
    """The recipes of the runs, in their order."""
    found: list[Any] = [train.RECIPES.get(name) or train_head.RECIPES[name] for name in options.names]
    steps = options.steps or [recipe.steps for recipe in found]
    return [
        dataclasses.replace(
            recipe,
            steps=count,
            matmul_precision=options.matmul_precision,
            warmup=min(recipe.warmup, count - isinstance(recipe, train_head.Recipe)),
        )
        for recipe, count in zip(found, steps, strict=True)
    ]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains what is not done."""
    alone()
    for recipe in recipes(options):
        folder, of_head = options.runs / recipe.name, isinstance(recipe, train_head.Recipe)
        start = str(options.runs / options.backbones[recipe.ground == "chains"] / "model")
        claim(folder, recipe.settled(store.fingerprint(start)) if of_head else recipe.settled())
        copy = None if options.export is None else options.export / recipe.name
        done = folder / "held_out.json"
        if not done.exists() or (copy is not None and not copy.exists()):
            print(f"{recipe.name}: {folder}")
            if of_head:
                train_head.main(recipe, start, folder, copy, options.minutes)
            else:
                train.main(recipe, folder, copy, options.minutes)
        if not done.exists():
            raise SystemExit(f"{recipe.name} is not done yet: run the same command again")
        found = json.loads(done.read_text(encoding="utf-8"))
        told = f"{found['kl_ratio']:.3f} of no head" if of_head else f"{found['nats']:.4f} nats a token"
        print(f"{recipe.name}: {told}")


if __name__ == "__main__":
    run(main)
