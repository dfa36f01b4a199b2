"""Trains the small models of the README and of the studies.

`python -m experiments.common.train tiny-recurrent`. The recipe of `tiny-recurrent`: word problems of growing
length, a recurrence whose mean grows with the step, truncated backpropagation. `tiny-recurrent-exponential`
is that model finetuned with a recurrence drawn from an exponential distribution, as the math model of arXiv
2510.14961 was. `tiny-causal` is a plain causal transformer on the same problems, trained in three runs:
look-ups are practised once the first has learned to make any, and the third goes on with a low learning rate.
A run that was stopped goes on where its last checkpoint stood. `experiments/launch` starts it on several processes.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from experiments.common.command import run
from experiments.common.processes import by_first, claim_together
from experiments.common.runs import hooks_of
from experiments.common.watch import Watch
from experiments.tasks import build_tokenizer, token_spec, word_problem_batches
from experiments.tasks.batches import Bucket, Mixture
from paradec_jax import store
from paradec_jax.config import CausalConfig, RecurrentDepthConfig
from paradec_jax.families import PRESETS, init_params, matrix_axes
from paradec_jax.losses import exponential, next_token_loss, poisson_lognormal, recurrent_loss
from paradec_jax.models import RecurrentDepthNetwork, TransformerNetwork, batch_flops
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.sharding.processes import gathered
from paradec_jax.train import TrainState, fit, make_train_step, muon

# Nine problems of ten fit; with room for the longest, a fifth to a third of a batch would be padding.
BUCKETS = (Bucket(2, 2, 102), Bucket(3, 4, 161), Bucket(5, 6, 226), Bucket(7, 8, 286))
AUXILIARY = (
    Bucket(0, 0, 128, task="sums"),
    Bucket(0, 0, 256, task="steps"),
    Bucket(0, 0, 128, task="recalls"),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      preset: model shape, a name of `paradec_jax.PRESETS`.
      start: a model folder or the name of a bundled model whose weights the run starts from; random ones if None.
      draw: distribution of the recurrence, "poisson_lognormal" or "exponential".
      steps: updates.
      cooldown: last updates, over which the learning rates fall.
      batch_tokens: positions of a batch, padding included.
      learning_rate: peak of Muon, for matrices.
      adam_learning_rate: peak of NAdam, for the embedding, norms and biases.
      weight_decay: decoupled decay of matrices.
      first_mean, last_mean: M of the recurrence's draw before and after the curriculum; E[r] = M + 1 for the
        Poisson draw.
      growth: updates between which M grows.
      mixture: from which update on, and how often, each of `BUCKETS` and `AUXILIARY` is drawn: two-step problems
        first, then much practice, then problems of all lengths.
      backprop_depth: recurrences that carry gradient.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run.
      exported_bits: significant bits of the exported weights; the rest of a float32 are zeros, which take no room
        in a compressed file.
      seed: of parameters, data and draws.
    """

    name: str = "tiny-recurrent"
    preset: str = "tiny-recurrent"
    start: str | None = None
    draw: Literal["poisson_lognormal", "exponential"] = "poisson_lognormal"
    steps: int = 10_000
    cooldown: int = 2500
    batch_tokens: int = 2048
    learning_rate: float = 8e-3
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    first_mean: float = 1.5
    last_mean: float = 3.0
    growth: tuple[int, int] = (1500, 5000)
    mixture: Mixture = (
        (0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
        (1500, (0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)),
        (1800, (0.15, 0.2, 0.1, 0.05, 0.2, 0.3, 0.0)),
        (5000, (0.1, 0.1, 0.05, 0.05, 0.0, 0.3, 0.4)),
        (6500, (0.15, 0.25, 0.1, 0.05, 0.0, 0.3, 0.15)),
        (7000, (0.15, 0.3, 0.12, 0.08, 0.1, 0.25, 0.0)),
        (8500, (0.25, 0.4, 0.15, 0.1, 0.05, 0.05, 0.0)),
    )
    backprop_depth: int = 4
    ema_decay: float = 0.999
    matmul_precision: str = "BF16_BF16_F32"
    exported_bits: int = 24
    seed: int = 0

    def mean_recurrence(self, step: jax.Array) -> jax.Array:
        """M of the recurrence's draw at an update: constant, then linear, then constant."""
        start, end = self.growth
        progress = jnp.clip((step - start) / (end - start), 0.0, 1.0)
        return self.first_mean + progress * (self.last_mean - self.first_mean)


_PRACTISED = (0.25, 0.4, 0.15, 0.1, 0.05, 0.05, 0.0)

RECIPES = {
    "tiny-recurrent": Recipe(),
    "tiny-recurrent-exponential": Recipe(
        name="tiny-recurrent-exponential",
        start="tiny-recurrent",
        draw="exponential",
        steps=600,
        cooldown=400,
        learning_rate=1e-3,
        adam_learning_rate=4e-4,
        first_mean=16.0,
        last_mean=16.0,
        mixture=((0, _PRACTISED),),
        ema_decay=0.99,
        seed=1,
    ),
    "tiny-causal-first": Recipe(
        name="tiny-causal-first",
        preset="tiny-causal",
        steps=4400,
        cooldown=1700,
        mixture=(
            (0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
            (500, (0.15, 0.2, 0.1, 0.05, 0.2, 0.3, 0.0)),
            (2700, _PRACTISED),
        ),
    ),
    "tiny-causal-second": Recipe(
        name="tiny-causal-second",
        preset="tiny-causal",
        start="runs/tiny-causal-first/model",
        steps=2600,
        cooldown=1300,
        mixture=(
            (0, (0.1, 0.1, 0.05, 0.05, 0.0, 0.3, 0.4)),
            (950, (0.15, 0.3, 0.12, 0.08, 0.1, 0.25, 0.0)),
            (1300, _PRACTISED),
        ),
        seed=1,
    ),
    "tiny-causal": Recipe(
        name="tiny-causal",
        preset="tiny-causal",
        start="runs/tiny-causal-second/model",
        steps=800,
        cooldown=700,
        learning_rate=2.5e-3,
        adam_learning_rate=1e-3,
        mixture=((0, _PRACTISED),),
        ema_decay=0.99,
        exported_bits=16,
        seed=2,
    ),
    # What tiny-jacobi replays, alone: whether its answers owe more to distillation or to practice.
    "control": Recipe(
        name="control",
        preset="tiny-causal",
        start="tiny-causal",
        steps=1500,
        cooldown=600,
        batch_tokens=1024,
        adam_learning_rate=3.2e-3,
        weight_decay=0.0,
        mixture=((0, (0.4, 0.3, 0.3, 0.0, 0.0, 0.0, 0.0)),),
        ema_decay=0.99,
        seed=100,
    ),
}
DRAWS = {"poisson_lognormal": poisson_lognormal, "exponential": exponential}


def rounded(params: Any, bits: int) -> Any:
    """Parameters with `bits` significant bits each, in their own dtype."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(leaf)
        return jnp.ldexp(jnp.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(leaf.dtype)

    return params if bits >= 24 else jax.tree.map(of_leaf, params)


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    folder: Path | None = None,
    export: Path | None = None,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
    watch: tyro.conf.OmitArgPrefixes[Watch] = Watch(),  # noqa: B008
) -> None:
    """Trains a model and, when done, writes the averaged weights as a model folder.

    Args:
      recipe: the numbers of the run.
      folder: where checkpoints and metrics go; `runs/NAME` by default.
      export: where the finished model goes; `FOLDER/model` by default.
      allow: what may differ from what the run was begun with (`FOLDER/run.json`, `recipe.json`), such as "loss".
      cluster: processes and devices.
      watch: what is told beside the log.
    """
    folder = Path("runs") / recipe.name if folder is None else folder
    more = watch.hooks(folder, recipe.steps)
    mesh = cluster.join()
    jax.config.update("jax_default_matmul_precision", recipe.matmul_precision)
    config = PRESETS[recipe.preset]
    tokenizer = build_tokenizer()
    key = jax.random.key(recipe.seed)
    data = word_problem_batches(
        tokenizer,
        seed=recipe.seed,
        batch_tokens=recipe.batch_tokens,
        buckets=(*BUCKETS, *AUXILIARY),
        mixture=recipe.mixture,
    )
    network: RecurrentDepthNetwork | TransformerNetwork
    if isinstance(config, RecurrentDepthConfig):
        network, draw = RecurrentDepthNetwork(config), DRAWS[recipe.draw](recipe.mean_recurrence)
        loss = recurrent_loss(network, draw, recipe.backprop_depth, remat=True)
    elif isinstance(config, CausalConfig):
        network = TransformerNetwork(config)
        loss = next_token_loss(network)
    else:
        raise SystemExit(f"{recipe.preset} is of family {config.family}, which has a recipe of its own")
    optimizer = muon(
        recipe.learning_rate,
        recipe.steps,
        axes=matrix_axes(config),
        warmup=100,
        cooldown=recipe.cooldown,
        weight_decay=recipe.weight_decay,
        adam_learning_rate=recipe.adam_learning_rate,
    )
    if recipe.start is None:
        params = init_params(config, jax.random.fold_in(key, 0))
    else:
        model = store.load(recipe.start)
        if model.config != config:
            raise SystemExit(f"{recipe.start} has not the shape {recipe.preset}: {model.config}")
        params = dict(model.params)
    claim_together(folder, recipe, allow)
    state = TrainState.create(params, optimizer, jax.random.fold_in(key, 1), ema=True, mesh=mesh)
    step = make_train_step(loss, optimizer, ema_decay=recipe.ema_decay)
    flops = batch_flops(network, recipe.backprop_depth)
    hooks = hooks_of(folder, 200, flops=flops, allow=allow, more=more)
    state = fit(step, state, data, steps=recipe.steps, hooks=hooks)
    assert state.ema is not None
    params = rounded(gathered(state.ema), recipe.exported_bits)
    trained = store.Model(config=config, params=params, token_spec=token_spec(), tokenizer=tokenizer)
    where = folder / "model" if export is None else export
    by_first("export", lambda: store.save(where, trained, overwrite=True))


if __name__ == "__main__":
    run(main)
