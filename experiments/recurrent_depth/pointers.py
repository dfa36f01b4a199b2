"""Trains a model of a task that needs depth: `python -m experiments.recurrent_depth.pointers
tiny-pointers`.

Where does a chain of pointers lead (`experiments.tasks.pointers`)? After the first recurrence the
model is to say the query itself, after each further one the name one look-up on, until the chain
ends. That target for every recurrence is the curriculum, together with the length of the tables and
the number of recurrences asked for, which grow. Prompts are read with a drawn number of
recurrences, mostly few, so the look-ups are made at the answers' positions. A run that was stopped
goes on where its last checkpoint stood.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from experiments.common.command import alone, run
from experiments.common.runs import rounded
from experiments.recurrent_depth.stepwise import stepwise_loss
from experiments.tasks import build_tokenizer, token_spec
from experiments.tasks.pointers import Stage, pointer_batches
from paradec_jax import store
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.families import init_params, matrix_axes
from paradec_jax.losses import exponential
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.train import Checkpoint, Log, Preempt, TrainState, fit, make_train_step, muon


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of the run.

    Attributes:
      name: of the run and its folder.
      width, heads: of the network, whose feed-forward layers are twice as wide.
      max_length: longest sequence of the network.
      chains: of a table.
      curriculum: what is asked for, by update.
      prompt_mean: M of the prompt's recurrence, `max(1, round(Exp(M)))`, once look-ups have been
        learned.
      prompt_from: updates up to which prompts are read once.
      backprop_depth: recurrences of the answers that gradients cross.
      updates: of the training.
      warmup, cooldown: first and last updates, over which the learning rates rise and fall.
      learning_rate: peak of Muon, for matrices.
      adam_learning_rate: peak of NAdam, for the embedding, norms and biases.
      weight_decay: decoupled decay of matrices.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run.
      exported_bits: significant bits of the exported weights.
      seed: of parameters, problems and draws.
    """

    name: str
    width: int
    heads: int
    curriculum: tuple[Stage, ...]
    prompt_from: int
    updates: int
    cooldown: int
    learning_rate: float
    adam_learning_rate: float
    max_length: int = 128
    chains: int = 2
    prompt_mean: float = 2.0
    backprop_depth: int = 2
    warmup: int = 100
    weight_decay: float = 0.02
    ema_decay: float = 0.99
    matmul_precision: str = "BF16_BF16_F32"
    exported_bits: int = 16
    seed: int = 0

    @property
    def shape(self) -> RecurrentDepthConfig:
        """The network's."""
        return RecurrentDepthConfig(
            vocab_size=384,
            width=self.width,
            heads=self.heads,
            feed_forward=2 * self.width,
            prelude_layers=1,
            core_layers=2,
            coda_layers=1,
            max_length=self.max_length,
            rope_base=10_000.0,
            mean_recurrence=16,
            mean_backprop_depth=16,
        )

    def prompt_mean_at(self, step: jax.Array) -> jax.Array:
        """M at an update; so small at first that every draw is 1."""
        return jnp.where(step < self.prompt_from, 1e-3, self.prompt_mean)


RECIPES = {
    "tiny-pointers": Recipe(
        name="tiny-pointers",
        width=64,
        heads=2,
        curriculum=(
            Stage(0, 8, 2),
            Stage(450, 16, 3),
            Stage(600, 24, 4),
            Stage(700, 24, 6),
            Stage(800, 24, 8),
            Stage(900, 24, 10),
            Stage(1000, 24, 12),
            Stage(1200, 24, 14),
        ),
        prompt_from=700,
        updates=3000,
        cooldown=2400,
        learning_rate=8e-3,
        adam_learning_rate=3e-3,
    ),
    # The norm of an update grows with the square root of the width, so its rate is halved. Lists of
    # 64 names were learned only where the look-ups had been learned on 16, and the longer lists
    # first came with two recurrences.
    "wide-pointers": Recipe(
        name="wide-pointers",
        width=256,
        heads=8,
        max_length=256,
        curriculum=(
            Stage(0, 8, 2, rows=32),
            Stage(360, 16, 3, rows=32),
            Stage(480, 24, 4, rows=32),
            Stage(560, 24, 6, rows=32),
            Stage(640, 24, 8, rows=32),
            Stage(720, 24, 10, rows=32),
            Stage(800, 24, 12, rows=32),
            Stage(950, 24, 14, rows=32),
            Stage(1050, 24, 14, queries=32, rows=16),  # too much at once; taken back
            Stage(1100, 24, 14, rows=32),
            Stage(1180, 8, 2, queries=64, rows=16),
            Stage(1450, 16, 4, queries=64, rows=16),
            Stage(1530, 24, 14, queries=64, rows=12),
        ),
        prompt_from=600,
        updates=2200,
        cooldown=1800,
        learning_rate=4e-3,
        adam_learning_rate=2e-3,
        exported_bits=8,
    ),
}


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    folder: Path | None = None,
) -> None:
    """Trains and writes the averaged weights as a model folder.

    Args:
      recipe: the numbers of the run.
      folder: where checkpoints, metrics and the model go; `runs/NAME` by default.
    """
    alone()
    folder = Path("runs") / recipe.name if folder is None else folder
    place = folder / "training"
    shape, tokenizer, key = recipe.shape, build_tokenizer(), jax.random.key(recipe.seed)
    data = pointer_batches(
        tokenizer, seed=recipe.seed, chains=recipe.chains, curriculum=recipe.curriculum
    )
    draw = exponential(recipe.prompt_mean_at)
    loss = stepwise_loss(RecurrentDepthNetwork(shape), draw, recipe.backprop_depth, remat=True)
    optimizer = muon(
        recipe.learning_rate,
        recipe.updates,
        axes=matrix_axes(shape),
        warmup=recipe.warmup,
        cooldown=recipe.cooldown,
        weight_decay=recipe.weight_decay,
        adam_learning_rate=recipe.adam_learning_rate,
    )
    with jax.default_matmul_precision(recipe.matmul_precision):
        params = init_params(shape, jax.random.fold_in(key, 0))
        state = fit(
            make_train_step(loss, optimizer, ema_decay=recipe.ema_decay),
            TrainState.create(params, optimizer, jax.random.fold_in(key, 1), ema=True),
            data,
            steps=recipe.updates,
            hooks=[Log(place, every=20), Checkpoint(place, every=100), Preempt()],
        )
    assert state.ema is not None
    params = rounded(state.ema, recipe.exported_bits)
    trained = store.Model(config=shape, params=params, token_spec=token_spec(), tokenizer=tokenizer)
    store.save(folder / "model", trained, overwrite=True)


if __name__ == "__main__":
    run(main)
