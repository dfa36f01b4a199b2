"""What a residual head has to learn from: how far a backbone's scores are from what it says after reveals.

    python -m experiments.block_diffusion.uncorrected tiny-sdar
    python -m experiments.block_diffusion.uncorrected runs/chains/model --recipes chains-head chains-counts

A line of the table is a recipe of `train_head` and a step k, on held-out text: the divergence that a head leaves that
adds nothing, over the positions that the step is judged at. Beside its mean stand the shares of positions above a
tenth of a nat and above one, and the part of the sum that comes from those above half a nat: where nearly all
positions have nothing to mend, a training sees few that have.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.block_diffusion.train_head import RECIPES, Recipe, backbone_of
from experiments.common.command import run as run_command
from experiments.common.record import write_record
from paradec_jax import Model, facts, store
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.losses.residual import Unrolling
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.models.residual_head import init_params


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: folder, or name of a bundled model, of block diffusion.
      recipes: names of recipes of `train_head`, whose grounds, noise, reveals and steps are measured.
      batches: of held-out text.
      batch_tokens: positions of a batch.
      seed: of noise and reveals.
      out: where the JSON goes.
    """

    model: tyro.conf.Positional[str]
    recipes: tuple[str, ...] = ("tiny-head",)
    batches: int = 8
    batch_tokens: int = 4096
    seed: int = 0
    out: Path = Path("experiments/block_diffusion/results/uncorrected.json")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.recipes if name not in RECIPES]:
            raise ValueError(f"no recipe {', '.join(unknown)}: choose of {', '.join(RECIPES)}")
        if len({RECIPES[name].source() for name in self.recipes}) != 1:
            raise ValueError("recipes must be one or several of one ground")
        if min(self.batches, self.batch_tokens) < 1:
            raise ValueError("batches and batch_tokens must be at least 1")


@functools.partial(jax.jit, static_argnums=0)
def divergences(
    unrolling: Unrolling, head: Any, params: Any, batch: Any, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """KL of a head that adds nothing [K, B, T], and where steps are judged."""
    of_texts, of_reveals = jax.random.split(key)
    texts = unrolling.texts(batch, of_texts)
    steps = unrolling.unroll(head, params, texts, of_reveals)
    return unrolling.judge(params, texts, steps)[1]["uncorrected_kl"], steps.still


def measured(model: Model, recipe: Recipe, options: Options) -> list[dict[str, Any]]:
    """A line for each step of a recipe."""
    head = ResidualHeadNetwork(ResidualHeadConfig.of(model.config, 1))
    zero = init_params(head.config, jax.random.key(0), "zero_gain")
    unrolling = Unrolling(model.network, head, model.token_spec, recipe.rules(), 32)
    made = recipe.source().held_out(options.batch_tokens, math.lcm(*unrolling.lengths))
    found: list[list[np.ndarray]] = [[] for _ in range(recipe.unroll)]
    for i in range(options.batches):
        key = jax.random.fold_in(jax.random.key(options.seed), i)
        batch = jax.tree.map(jnp.asarray, made(i))
        values, still = jax.device_get(divergences(unrolling, zero, model.params, batch, key))
        for kept, of_step, judged in zip(found, values, still, strict=True):
            kept.append(of_step[judged].astype(np.float64))
    lines = [np.concatenate(of_step) for of_step in found]
    if empty := [k for k, nats in enumerate(lines, 1) if not nats.size]:
        raise ValueError(f"step {empty[0]} of {recipe.name} judges no position: take more batches")
    return [{"recipe": recipe.name, "step": k, **spread(nats)} for k, nats in enumerate(lines, 1)]


def spread(nats: np.ndarray) -> dict[str, float]:
    """How divergences lie: their mean, shares of large ones, and what part of the sum is theirs."""
    return {
        "positions": nats.size,
        "mean": float(nats.mean()),
        "above_0.1": float((nats > 0.1).mean()),
        "above_1": float((nats > 1).mean()),
        "of_sum_above_0.5": float(nats[nats > 0.5].sum() / max(nats.sum(), 1e-12)),
    }


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Writes and prints the table."""
    recipes = [RECIPES[name] for name in options.recipes]
    model = backbone_of(options.model, recipes[0].source())
    rows = [line for recipe in recipes for line in measured(model, recipe, options)]
    sha256 = store.fingerprint(options.model)
    record = {"model_sha256": sha256, "rows": rows}
    write_record(options.out, options, record, dtypes=facts.dtypes(model.params))
    for row in rows:
        print(
            f"{row['recipe']:20s} step {row['step']}  {row['mean']:.4f} nats, {100 * row['above_0.1']:.1f}% above "
            f"0.1, {100 * row['above_1']:.1f}% above 1; {100 * row['of_sum_above_0.5']:.0f}% of the sum above 0.5"
        )


if __name__ == "__main__":
    run_command(main)
