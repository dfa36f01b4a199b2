"""Word problems as infilling: answers filled in any order, by a denoiser that began as a causal model.

    python -m experiments.block_diffusion.train tiny-sdar-next --blocks 96 --steps 400 --folder runs/infilling
    python -m experiments.masked_diffusion.infilling --model runs/infilling/model

A network whose one block is as long as a short problem and its answer is a masked denoiser: all positions of the
block see one another, the question is given, the answer is hidden. It is trained from the weights of `tiny-causal`,
which solves these problems from left to right. Filled are unseen problems in each number of steps a block, the surest
positions first, beside one position a step; and beside the causal model itself.
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.tasks import word_problems
from paradec_jax import AutoRegressive, BlockDenoising, facts, load, store
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import compare


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder of block diffusion.
      causal: the causal model that it began as; a model folder or the name of a bundled one.
      steps: of a block, beside one position a step.
      problem_steps: fewest and most steps of a problem's solution.
      problems: unseen problems.
      seed: of the problems and of all draws.
      out: where the JSON goes.
    """

    model: str = "runs/infilling/model"
    causal: str = "tiny-causal"
    steps: tuple[int, ...] = (8, 16, 32)
    problem_steps: tuple[int, int] = (2, 2)
    problems: int = 100
    seed: int = 0
    out: Path = Path("experiments/masked_diffusion/results/infilling.json")

    def __post_init__(self) -> None:
        if not self.steps or min(self.steps) < 1:
            raise ValueError(f"steps must be numbers of at least 1, not {self.steps}")


def settings(options: Options) -> list[Setting]:
    """One position a step, then each number of steps, greedy."""
    decoder = BlockDenoising(rule="static")
    found = [Setting("one a step", decoder, decoder.Knobs(temperature=0.0), baseline=True)]
    for steps in options.steps:
        found.append(Setting(f"{steps} steps a block", decoder, decoder.Knobs(temperature=0.0, steps=steps)))
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Fills, prints and writes the rows."""
    model, causal = load(options.model, dtype="float32"), load(options.causal, dtype="float32")
    if model.family != "block_diffusion" or causal.family != "causal":
        raise ValueError(
            f"model must be of block diffusion and causal a causal one, not {options.model} and {options.causal}"
        )
    if max(options.steps) > model.network.block:
        raise ValueError(
            f"steps must be at most the block's length {model.network.block}, not {options.steps}"
        )
    problems = word_problems(options.problems, seed=options.seed, steps=options.problem_steps, split="test")
    rows: list[dict[str, Any]] = []
    beside = [Setting("from left to right", AutoRegressive(), baseline=True)]
    for one, place, of in ((model, options.model, settings(options)), (causal, options.causal, beside)):
        (name,) = store.names_of([place])
        rows += compare(one, problems, of, name=name, seed=options.seed, timed=0).rows
    for row in rows:
        low, high = row["interval"]
        print(
            f"{row['decoder']:20s} exact {row['exact']}/{row['problems']} [{low:.1%}, {high:.1%}]  "
            f"tokens a call {row['tokens_per_network_call']:.2f}"
        )
    models = {name: store.fingerprint(name) for name in (options.model, options.causal)}
    result = {"rows": rows, "models_sha256": {Path(name).name: sha for name, sha in models.items()}}
    dtypes = facts.dtypes([model.params, causal.params])
    write_record(options.out, options, result, dtypes=dtypes)


if __name__ == "__main__":
    run(main)
