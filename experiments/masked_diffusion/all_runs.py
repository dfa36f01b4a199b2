"""All trainings, one after the other: `python -m experiments.masked_diffusion.all_runs FILE`.

A denoiser, its autoregressive rival, the judge of both, and all rounds of the denoiser's self-distillation. Each has
its minutes, of which evaluations and checkpoints take a part. The same command goes on where a run stood, and passes
over those that are done; a run that its minutes ended ends the command, for the next one may need its model.

    RUNS/tiny-mdlm  RUNS/tiny-rival  RUNS/tiny-judge  RUNS/halves          checkpoints, metrics, model, held_out.json
    EXPORT/tiny-mdlm  EXPORT/tiny-mdlm-distilled  EXPORT/tiny-judge        models in bfloat16
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import claim, run
from experiments.common.processes import alone
from experiments.masked_diffusion import distill, train

EXPORTED = {"tiny-mdlm": "tiny-mdlm", "tiny-judge": "tiny-judge", "halves": "tiny-mdlm-distilled"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train.

    Attributes:
      text: a file of plain text.
      runs: folder of the runs.
      export: folder of copies in half the size; none by default.
      minutes: of each run; the next call goes on.
      steps: updates of the teacher, the rival and the judge; those of the recipes when None. `step_cost` tells how
        many a machine does in the minutes.
      updates: of a round of the distillation, likewise: what `step_cost` tells of "halves" over the number of rounds.
      matmul_precision: of all runs; what suits the device when None.
    """

    text: tyro.conf.Positional[Path]
    runs: Path = Path("runs")
    export: Path | None = None
    minutes: float = 75.0
    steps: tuple[int, int, int] | None = None
    updates: int | None = None
    matmul_precision: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One run: its recipe, and what goes on with it in a folder, given where a copy of its model goes."""

    recipe: Any
    go_on: Callable[[Path, Path | None], None]


def stages(options: Options) -> Iterator[Stage]:
    """The runs in the order in which they need one another."""
    for i, recipe in enumerate(train.RECIPES.values()):
        changes: dict[str, Any] = {} if options.steps is None else {"steps": options.steps[i]}
        changed = dataclasses.replace(recipe, matmul_precision=options.matmul_precision, **changes)

        def go_on(folder: Path, export: Path | None, recipe: Any = changed) -> None:
            train.main(recipe, options.text, folder, export, options.minutes)

        yield Stage(changed, go_on)
    changes = {} if options.updates is None else {"updates": options.updates}
    rounds = dataclasses.replace(
        distill.RECIPES["halves"], matmul_precision=options.matmul_precision, **changes
    )
    start = str(options.runs / "tiny-mdlm" / "model")

    def of_rounds(folder: Path, export: Path | None) -> None:
        distill.main(rounds, options.text, start, folder, export, options.minutes)

    yield Stage(rounds, of_rounds)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains what is not done."""
    alone()
    for stage in stages(options):
        folder = options.runs / stage.recipe.name
        claim(folder, stage.recipe.settled())
        export = EXPORTED.get(stage.recipe.name)
        copy = None if options.export is None or export is None else options.export / export
        done = folder / "held_out.json"
        if not done.exists() or (copy is not None and not copy.exists()):
            print(f"{stage.recipe.name}: {folder}")
            stage.go_on(folder, copy)
        if not done.exists():
            raise SystemExit(f"{stage.recipe.name} is not done yet: run the same command again")
        found = json.loads(done.read_text(encoding="utf-8"))
        print(f"{stage.recipe.name}: {found['nats']:.4f} nats a character ({found['kind']})")


if __name__ == "__main__":
    run(main)
