"""Consistency distillation of a recurrent-depth model: `sh experiments/recipes/jacobi.sh
tiny-recurrent-distilled`.

A wave commits more than one token a step only where the model guesses well after tokens that are
not settled yet. So `tiny-recurrent`, its core deepened by layers that begin as pass-through, learns
from the Jacobi trajectories of `tiny-causal` (same tokens, same problems) to say after any iterate
of a trajectory what it says after its last, at few recurrences, while it replays the problems at
more. The options of the run are those of `paradec train`, and a run that was stopped goes on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, cast

import jax
import jax.numpy as jnp
import tyro

from experiments.common import command
from experiments.common.runs import rounded
from experiments.recurrent_depth.growth import deepen_core
from experiments.recurrent_depth.recurrent_consistency import Unrolled, recurrent_consistency_loss
from paradec_jax import Model, load
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.data.pairs import worth_training
from paradec_jax.losses import next_token_loss, poisson_lognormal, recurrent_loss
from paradec_jax.objective import Objective
from paradec_jax.objectives.jacobi import RULES, Jacobi, rehearsing
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.run import train


@dataclasses.dataclass(frozen=True)
class Waves(Training):
    """Teaches a recurrent-depth model to guess well after tokens that are not settled yet.

    Attributes:
      source: causal model with the same tokenizer, whose Jacobi trajectories are learned from.
      block: tokens of a block of them.
      new_tokens: most tokens of an answer.
      problems: prompts that it answers; all of them when None.
      rehearse: share of a batch that are examples of the data.
      copies: new layers after each layer of the core; 0 adds none.
      mean: M of the recurrence at which noisy blocks are read; E[r] = M + 1.
      rehearsal_mean: M of the recurrence of the examples.
      backprop_depth, rehearsal_depth: recurrences that carry gradient in either.
      filler_share: share of the blocks whose wrong tokens are uniformly random.
      bits: significant bits of the weights that are written.
    """

    source: str = "tiny-causal"
    block: int = 16
    new_tokens: int = 224
    problems: int | None = None
    rehearse: float = 0.25
    copies: int = 1
    mean: float = 1.5
    rehearsal_mean: float = 3.0
    backprop_depth: int = 3
    rehearsal_depth: int = 4
    filler_share: float = 0.3
    bits: int = 16

    BOUNDS = {"copies": (0, 64)}  # noqa: RUF012
    families = ("recurrent_depth",)

    def train(self, job: Job) -> Model:
        """Collects the trajectories of the causal model, and trains the recurrent one, deepened, on
        them.
        """
        model, source = job.model, load(self.source)
        words, own = source.tokenizer, model.tokenizer
        if source.family != "causal" or words is None or own is None or not words.same_as(own):
            raise ValueError(f"source must be a causal model with the tokenizer of {job.run.model}")
        split = job.mesh is not None and job.mesh.shape["fsdp"] * job.mesh.shape["tensor"] > 1
        if split and jax.process_count() > 1 and jax.default_backend() == "cpu":
            raise ValueError(
                "processes on CPUs cannot split the parameters of this training, as collectives fail there "
                "(docs/meshes.md): add --cluster.data -1 --cluster.fsdp 1"
            )
        recipe = Jacobi(
            block=(self.block,),
            new_tokens=self.new_tokens,
            problems=self.problems,
            rows=64,
            rehearse=self.rehearse,
        )
        found = recipe.collected(job, source, 0, self.block)
        data, updates = recipe.data(
            job, found, worth_training(found, stop=model.token_spec.stop), job.run.seed
        )
        if self.copies:
            key, shape = jax.random.key(job.run.seed), cast(RecurrentDepthConfig, model.config)
            config, params = deepen_core(shape, dict(model.params), key, self.copies)
            model = dataclasses.replace(model, config=config, params=params)
        model = job.fit("waves", model, self.objective(model), data, updates=updates)
        return dataclasses.replace(model, params=rounded(model.params, self.bits))

    def objective(self, model: Model) -> Objective:
        """Consistency after noisy blocks plus the next token of examples, each at a recurrence of
        its own.
        """
        network, draw = model.network, poisson_lognormal(self.mean)
        share, spec = self.filler_share, model.token_spec
        noisy = recurrent_consistency_loss(
            network, draw, self.backprop_depth, spec, RULES, filler_share=share, remat=True
        )
        draw = poisson_lognormal(self.rehearsal_mean)
        again = recurrent_loss(network, draw, self.rehearsal_depth, remat=True)
        return rehearsing(noisy, again, RULES.ar_weight)

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """Loss in nats a token at the mean recurrence, and the share of tokens that the model would
        have chosen.
        """
        recurrence, key = jnp.int32(model.network.recurrence), jax.random.key(job.run.seed)
        return job.means(next_token_loss(Unrolled(model.network, recurrence, key, 1)), model)


def main(
    waves: Annotated[Waves, tyro.conf.arg(name="")], run: Annotated[Run, tyro.conf.arg(name="")]
) -> None:
    """Collects the trajectories where that is not done, trains, and writes the model."""
    train(waves, run)


if __name__ == "__main__":
    command.run(main)
