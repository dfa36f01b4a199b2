"""AdamW with the trapezoid schedule and weight decay chosen by parameter path."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def trapezoid(peak: float, steps: int, *, warmup: int = 0, cooldown: int = 0) -> optax.Schedule:
    """Learning rate that climbs linearly, stays, and falls linearly towards zero.

        lr(t) = peak * min(1, (t + 1) / warmup, (steps - t) / cooldown),    t = 0 .. steps - 1

    No update has rate zero: the first has peak / warmup, the last peak / cooldown.

    Raises:
      ValueError: if a length is negative or the two ramps are longer than `steps`.
    """
    if warmup < 0 or cooldown < 0 or warmup + cooldown > steps:
        raise ValueError(
            f"warmup {warmup} and cooldown {cooldown} must not be negative and must fit into steps {steps}"
        )

    def schedule(count: jax.Array | int) -> jax.Array:
        up = (count + 1) / max(warmup, 1)
        down = (steps - count) / max(cooldown, 1)
        return peak * jnp.clip(jnp.minimum(up, down), 0, 1)

    return schedule


def decay_mask(params: PyTree, exempt: str = "norm|bias") -> PyTree:
    """Booleans shaped like `params`, false where the regex `exempt` is found in the path ("a/norm/scale")."""

    def decays(path: tuple[Any, ...], _: jax.Array) -> bool:
        return re.search(exempt, jax.tree_util.keystr(path, simple=True, separator="/")) is None

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(
    learning_rate: float,
    steps: int,
    *,
    warmup: int = 0,
    cooldown: int = 0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    exempt: str = "norm|bias",
    clip: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) on a `trapezoid` schedule, after clipping by the global norm.

        g <- g * min(1, clip / |g|),    p <- p - lr(t) * (m / (sqrt(v) + eps) + weight_decay * decays(p) * p)

    Args:
      learning_rate: peak of the schedule.
      steps: length of the run in updates.
      warmup, cooldown: updates of the two ramps.
      b1, b2, eps: Adam's; m and v are the bias-corrected moments.
      weight_decay: factor of the decay, itself scaled by the learning rate.
      exempt: regex on paths of parameters that do not decay (`decay_mask`); embeddings do.
      clip: largest global norm of the gradient, or None.

    Raises:
      ValueError: from `trapezoid`.
    """
    optimizer = optax.adamw(
        trapezoid(learning_rate, steps, warmup=warmup, cooldown=cooldown),
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        mask=lambda params: decay_mask(params, exempt),
    )
    return optimizer if clip is None else optax.chain(optax.clip_by_global_norm(clip), optimizer)
