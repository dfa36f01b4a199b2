"""All trainings of block diffusion, one after the other: `python -m experiments.block_diffusion.all_runs`.

Both alignments on word problems at equal updates, then the chain language. Each has its minutes, of which evaluations
and checkpoints take a part. The same command goes on where a run stood and passes over those that are done; a run
that its minutes ended ends the command.

    RUNS/NAME          checkpoints, metrics, model, held_out.json
    EXPORT/NAME        models in bfloat16
"""

import dataclasses
import json
from pathlib import Path

import tyro

from experiments.block_diffusion import train
from experiments.common.command import claim, run

RUNS = ("tiny-sdar", "tiny-sdar-next", "chains")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train.

    Attributes:
      names: of the recipes of `train`.
      runs: folder of the runs.
      export: folder of copies in half the size; none by default.
      minutes: of each run; the next call goes on.
      steps: updates of each of `names`; those of the recipes when None. A run's `metrics.jsonl` tells its seconds an
        update, and so how many fit into its minutes.
      matmul_precision: of all runs; what suits the device when None.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = RUNS
    runs: Path = Path("runs")
    export: Path | None = None
    minutes: float = 75.0
    steps: tuple[int, ...] | None = None
    matmul_precision: str | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in train.RECIPES]:
            raise ValueError(f"no recipe {', '.join(unknown)}: choose of {', '.join(train.RECIPES)}")
        if self.steps is not None and len(self.steps) != len(self.names):
            raise ValueError(f"steps must be one number for each of {len(self.names)} runs, not {self.steps}")


def recipes(options: Options) -> list[train.Recipe]:
    """The recipes of the runs, in their order."""
    found = [train.RECIPES[name] for name in options.names]
    if options.steps is not None:
        found = [
            dataclasses.replace(recipe, steps=steps)
            for recipe, steps in zip(found, options.steps, strict=True)
        ]
    return [
        dataclasses.replace(
            recipe, matmul_precision=options.matmul_precision, warmup=min(recipe.warmup, recipe.steps)
        )
        for recipe in found
    ]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains what is not done."""
    for recipe in recipes(options):
        folder = options.runs / recipe.name
        claim(folder, recipe.settled())
        copy = None if options.export is None else options.export / recipe.name
        done = folder / "held_out.json"
        if not done.exists() or (copy is not None and not copy.exists()):
            print(f"{recipe.name}: {folder}")
            train.main(recipe, folder, copy, options.minutes)
        if not done.exists():
            raise SystemExit(f"{recipe.name} is not done yet: run the same command again")
        found = json.loads(done.read_text(encoding="utf-8"))
        print(f"{recipe.name}: {found['nats']:.4f} nats a token")


if __name__ == "__main__":
    run(main)
