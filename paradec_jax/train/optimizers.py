"""AdamW and Muon with the warmup-stable-decay schedule, and weight decay chosen by parameter path."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

PyTree = Any
Axes = tuple[tuple[int, ...], tuple[int, ...]]


def warmup_stable_decay(
    peak: float, steps: int, *, warmup: int = 0, cooldown: int = 0
) -> optax.Schedule:
    """Learning rate that climbs linearly, stays, and falls linearly towards zero.

        lr(t) = peak * min(1, (t + 1) / warmup, (steps - t) / cooldown),    t = 0 .. steps - 1

    No update has rate zero: the first has peak / warmup, the last peak / cooldown.
    """
    if warmup < 0 or cooldown < 0 or warmup + cooldown > steps:
        raise ValueError(f"warmup {warmup} and cooldown {cooldown} must fit into steps {steps}")

    def schedule(count: jax.Array | int) -> jax.Array:
        up = (count + 1) / max(warmup, 1)
        down = (steps - count) / max(cooldown, 1)
        return peak * jnp.clip(jnp.minimum(up, down), 0, 1)

    return schedule


def decay_mask(params: PyTree) -> PyTree:
    """Booleans shaped like `params`, false for norms and biases, by their paths ("a/norm/scale")."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: re.search("norm|bias", jax.tree_util.keystr(path)) is None, params
    )


def adamw(
    learning_rate: float,
    steps: int,
    *,
    warmup: int = 0,
    cooldown: int = 0,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) on a `warmup_stable_decay` schedule, after clipping by the
    global norm.

        g <- g / max(1, |g|),    p <- p - lr(t) * (m / (sqrt(v) + eps) + weight_decay * decays(p) * p)

    Args:
      learning_rate: peak of the schedule.
      steps: length of the run in updates.
      warmup, cooldown: updates of the two ramps.
      b2, eps: constants of Adam, with b1 = 0.9; m and v are the bias-corrected moments.
      weight_decay: factor of the decay, itself scaled by the learning rate; norms and biases do not
        decay.
    """
    rate = warmup_stable_decay(learning_rate, steps, warmup=warmup, cooldown=cooldown)
    optimizer = optax.adamw(rate, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def muon(
    learning_rate: float,
    steps: int,
    *,
    axes: Mapping[str, Axes],
    warmup: int = 0,
    cooldown: int = 0,
    weight_decay: float = 0.1,
    adam_learning_rate: float = 2e-3,
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices named by `axes`, NAdam for all other parameters.

        m <- 0.95 m + g,    p <- p - lr(t) * (0.2 sqrt(max(n_in, n_out)) U V^T + weight_decay * p)

    where `U S V^T` is the decomposition of the Nesterov momentum, found by five Newton-Schulz
    iterations, and the factor makes an update's size that of AdamW's (Liu et al. 2025, arXiv
    2502.16982, eq. 4). Both optimizers follow the same `warmup_stable_decay`, each with its own
    peak, and see gradients clipped to a global norm of 1.

    Args:
      learning_rate: peak of Muon's schedule.
      steps: length of the run in updates.
      axes: for regexes on paths ("a/norm/scale"), (input axes, output axes) of the matrices in that
        parameter; axes in neither count matrices. The first regex found in a path decides.
      warmup, cooldown, weight_decay: those of `adamw`; matrices alone decay.
      adam_learning_rate: peak of NAdam's schedule.
    """

    def dimensions(path: tuple[Any, ...], _: jax.Array) -> MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        pairs = (pair for pattern, pair in axes.items() if re.search(pattern, name))
        return next((MuonDimensionNumbers(*pair) for pair in pairs), None)

    optimizer = optax.contrib.muon(
        warmup_stable_decay(learning_rate, steps, warmup=warmup, cooldown=cooldown),
        weight_decay=weight_decay,
        adam_b2=0.95,
        adam_learning_rate=warmup_stable_decay(
            adam_learning_rate, steps, warmup=warmup, cooldown=cooldown
        ),
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
            dimensions, params
        ),
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)
