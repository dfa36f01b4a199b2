"""Consistency distillation of a recurrent-depth model: `python -m experiments.recurrent_depth.distill_waves`.

A wave commits more than one token a step only where the model guesses well after tokens that are not settled
yet. So `tiny-recurrent`, its core deepened by layers that begin as pass-through, learns from the Jacobi
trajectories of `tiny-causal` (same tokens, same problems) to say after any iterate of a trajectory what it
says after its last, at few recurrences, while it replays the problems at more. The first round of
`jacobi/distill.py tiny-jacobi` collects the same trajectories, and the two can share them with
`--trajectories`. A run that was stopped goes on where it stood.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of, rounded
from experiments.jacobi import distill
from experiments.jacobi.distill import Together, fresh_problems, gather
from experiments.recurrent_depth.growth import deepen_core
from experiments.recurrent_depth.recurrent_consistency import recurrent_consistency_loss
from paradec_jax import load, store
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.data.pairs import Selection, kept, pair_batches
from paradec_jax.data.trajectories import Trajectories
from paradec_jax.families import matrix_axes
from paradec_jax.losses import poisson_lognormal, recurrent_loss
from paradec_jax.losses.consistency import ConsistencyRules
from paradec_jax.objective import Objective, Sums
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.train import TrainState, fit, make_train_step, muon
from paradec_jax.train.processes import all_or_none
from paradec_jax.train.recipe import check_allowed


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of the run.

    Attributes:
      name: of the run and its folder.
      start: model folder or name of the recurrent-depth model that the run starts from.
      copies: new layers after each layer of its core; 0 adds none.
      source: the recipe of `distill.py` whose first round says what the trajectories are.
      order: of the wanted noise, see `Selection`.
      rules: of the loss, see `ConsistencyRules`.
      updates: of the training.
      warmup, cooldown: first and last updates, over which the learning rate rises and falls.
      learning_rate: peak of Muon, for matrices.
      adam_share: learning rate of embedding, norms and biases, relative to that of the matrices.
      batch_tokens: positions of a batch, both copies and padding included.
      replay_tokens: positions of fresh problems that each batch has besides.
      mean: M of the recurrence at which noisy blocks are read; E[r] = M + 1.
      replay_mean: M of the recurrence of fresh problems.
      backprop_depth, replay_depth: recurrences that carry gradient in either.
      filler_share: share of the blocks whose wrong tokens are uniformly random.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run.
      exported_bits: significant bits of the exported weights.
      seed: of new layers, problems and batches.
    """

    name: str = "tiny-recurrent-distilled"
    start: str = "tiny-recurrent"
    copies: int = 1
    source: Literal[tuple(distill.RECIPES)] = "tiny-jacobi"  # type: ignore[valid-type]
    order: str = "uniform"
    rules: ConsistencyRules = distill.RULES
    updates: int = 1600
    warmup: int = 100
    cooldown: int = 640
    learning_rate: float = 8e-3
    adam_share: float = 0.4
    batch_tokens: int = 3072
    replay_tokens: int = 1024
    mean: float = 1.5
    replay_mean: float = 3.0
    backprop_depth: int = 3
    replay_depth: int = 4
    filler_share: float = 0.3
    ema_decay: float = 0.99
    matmul_precision: str = "BF16_BF16_F32"
    exported_bits: int = 16
    seed: int = 0


def objective(model: store.Model, recipe: Recipe) -> Objective:
    """Consistency after noisy blocks plus the next token of fresh problems, each at a recurrence of its own."""
    network = model.network
    noisy = recurrent_consistency_loss(
        network,
        poisson_lognormal(recipe.mean),
        recipe.backprop_depth,
        model.token_spec,
        recipe.rules,
        filler_share=recipe.filler_share,
        remat=True,
    )
    next_token = recurrent_loss(
        network, poisson_lognormal(recipe.replay_mean), recipe.replay_depth, remat=True
    )

    def sums(params: Any, frozen: Any, batch: dict[str, Any], key: jax.Array) -> Sums:
        of_pairs, of_fresh = jax.random.split(key)
        step = {"step": batch["step"]}
        again = next_token.sums(params, frozen, batch["fresh"] | step, of_fresh)
        return noisy.sums(params, frozen, batch["pairs"] | step, of_pairs) | distill.rehearsed(again)

    return Objective(sums, distill.with_rehearsal(noisy, recipe.rules.ar_weight))


def data_of(model: store.Model, recipe: Recipe, trajectories: Trajectories) -> Together:
    """Noisy and clean blocks, and fresh problems beside them."""
    replayed = dataclasses.replace(
        distill.RECIPES[recipe.source],
        seed=recipe.seed,
        replay_tokens=recipe.replay_tokens,
        start=recipe.start,
    )
    return Together(
        pairs=pair_batches(
            trajectories,
            seed=recipe.seed,
            selection=Selection(order=recipe.order),
            batch_tokens=recipe.batch_tokens,
            indices=kept(trajectories, stop=model.token_spec.stop),
        ),
        fresh=fresh_problems(model, replayed, 0),
    )


def deepened(model: store.Model, recipe: Recipe) -> store.Model:
    """The model that training starts from."""
    if not isinstance(model.config, RecurrentDepthConfig):
        raise SystemExit(f"{recipe.start} is of family {model.family}; waves need a recurrent-depth model")
    if recipe.copies == 0:
        return model
    config, params = deepen_core(model.config, dict(model.params), jax.random.key(recipe.seed), recipe.copies)
    return dataclasses.replace(model, config=config, params=params)


def main(
    recipe: tyro.conf.OmitArgPrefixes[Recipe],
    folder: Path | None = None,
    trajectories: Path | None = None,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
) -> None:
    """Collects the trajectories where that is not done (of several processes one does), trains, and writes the model.

    Args:
      recipe: the numbers of the run.
      folder: where everything goes; `runs/NAME` by default.
      trajectories: where they are, or go to; in the run's folder by default.
      allow: what may differ from what the run was begun with (`FOLDER/training/run.json`, `recipe.json`).
      cluster: processes and devices.
    """
    check_allowed(allow)
    folder = Path("runs") / recipe.name if folder is None else folder
    mesh = cluster.join()
    split = mesh is not None and mesh.shape["fsdp"] * mesh.shape["tensor"] > 1
    with all_or_none():  # all must hear it before one ends
        if split and jax.process_count() > 1 and jax.default_backend() == "cpu":
            raise ValueError(
                "processes on CPUs cannot split the parameters of this training, as collectives fail there "
                "(docs/meshes.md): add --data -1 --fsdp 1"
            )
    collected = distill.RECIPES[recipe.source]
    model, source = deepened(load(recipe.start), recipe), load(collected.start)
    if source.family != "causal":
        raise SystemExit(f"{collected.start} is of family {source.family}; trajectories need a causal model")
    if source.tokenizer is None or model.tokenizer is None:
        raise SystemExit("both models need a tokenizer")
    if not source.tokenizer.same_as(model.tokenizer):
        raise SystemExit(f"{recipe.start} and {collected.start} have different tokenizers")
    claim_together(folder, recipe, allow)
    where = trajectories or folder / "trajectories"
    with jax.default_matmul_precision(collected.matmul_precision):
        by_first("trajectories", functools.partial(gather, source, collected.start, collected, 0, where))
    with jax.default_matmul_precision(recipe.matmul_precision):
        optimizer = muon(
            recipe.learning_rate,
            recipe.updates,
            axes=matrix_axes(model.config),
            warmup=recipe.warmup,
            cooldown=recipe.cooldown,
            weight_decay=0.0,
            adam_learning_rate=recipe.adam_share * recipe.learning_rate,
        )
        key = jax.random.key(recipe.seed)
        state = fit(
            make_train_step(objective(model, recipe), optimizer, ema_decay=recipe.ema_decay),
            TrainState.create(dict(model.params), optimizer, key, ema=True, mesh=mesh),
            data_of(model, recipe, Trajectories(where)),
            steps=recipe.updates,
            hooks=hooks_of(folder / "training", 100, allow=allow),
        )
    assert state.ema is not None
    trained = dataclasses.replace(model, params=rounded(on_this(state.ema), recipe.exported_bits))
    by_first("model", functools.partial(store.save, folder / "model", trained, overwrite=True))


if __name__ == "__main__":
    run(main)
