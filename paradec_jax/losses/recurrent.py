"""Training of recurrent-depth models: random recurrence, truncated backpropagation.

Geiping et al. 2025, arXiv 2502.05171, section 3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.losses.cross_entropy import check_chunk, cross_entropy, scorer
from paradec_jax.losses.recorded import recorded_or
from paradec_jax.nn import masks
from paradec_jax.objective import Objective, Sums, drawn, weighted

Draw = Callable[[Array, Array], Int[Array, ""]]
Mean = float | Callable[[Array], Array]
SIGMA = 0.5  # spread of the log-normal distribution of recurrences


def _at(mean: Mean, step: Array) -> Array:
    return jnp.asarray(mean(step) if callable(mean) else mean, jnp.float32)


def poisson_lognormal(mean: Mean) -> Draw:
    """Draws the recurrence r of a training step with a heavy right tail.

    `lambda ~ LogNormal(ln M - sigma^2 / 2, sigma)` with sigma = 1/2, `r ~ Poisson(lambda) + 1`, so
    that E[r] = M + 1. The mean is M, or a schedule from the step number to M (a curriculum for
    small budgets).
    """

    def draw(key: Array, step: Array) -> Array:
        of_rate, of_count = jax.random.split(key)
        normal = jax.random.normal(of_rate)
        rate = jnp.exp(jnp.log(_at(mean, step)) - SIGMA**2 / 2 + SIGMA * normal)
        return jax.random.poisson(of_count, rate).astype(jnp.int32) + 1

    return draw


def exponential(mean: Mean) -> Draw:
    """Draws `r = max(1, round(Exp(M)))`: Exp(M) as in arXiv 2510.14961, C.6, rounding and minimum
    are ours.
    """

    def draw(key: Array, step: Array) -> Array:
        return jnp.maximum(1, jnp.round(_at(mean, step) * jax.random.exponential(key))).astype(
            jnp.int32
        )

    return draw


def settle(
    config: RecurrentDepthConfig, backprop_depth: int | None, remat: bool | None
) -> tuple[int, bool]:
    """Backpropagated recurrences, at least 1, and rematerialisation of a loss: the config's where
    they are None.
    """
    depth = config.mean_backprop_depth if backprop_depth is None else backprop_depth
    if depth < 1:
        raise ValueError(f"backprop_depth must be at least 1, not {depth}")
    return depth, config.remat == "iteration" if remat is None else remat


def unroll(
    network: Any,
    params: Any,
    state: Float[Array, "B T D"],
    e: Float[Array, "B T D"],
    view: Any,
    recurrence: Int[Array, ""] | int,
    backprop_depth: int,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """Iterates the core `recurrence` times; only the last `backprop_depth` steps carry gradient.

    The first `n = max(r - K, 0)` steps run in a dynamic loop on constants, the last `k = min(r, K)`
    in a scan of K steps whose first K - k are skipped, so that one program serves every r. The
    prelude output e carries gradient through the last k steps alone.
    """
    window = network.empty_window(*state.shape[:2])

    def iterate(params: Any, state: Array, e: Array) -> Array:
        return network.iterate(params, state, e, view, window, 0)[0]

    step = jax.checkpoint(iterate) if remat else iterate
    constants = lax.stop_gradient((params, e))
    constant_steps = jnp.maximum(recurrence - backprop_depth, 0)
    state = lax.fori_loop(
        0,
        constant_steps,
        lambda _, s: iterate(constants[0], s, constants[1]),
        lax.stop_gradient(state),
    )
    skipped = jnp.maximum(backprop_depth - recurrence, 0)

    def body(state: Array, index: Array) -> tuple[Array, None]:
        return lax.cond(index >= skipped, lambda s: step(params, s, e), lambda s: s, state), None

    return lax.scan(body, lax.stop_gradient(state), jnp.arange(backprop_depth))[0]


def recurrent_loss(
    network: Any,
    draw: Draw,
    backprop_depth: int | None = None,
    *,
    remat: bool | None = None,
    chunk: int | None = None,
) -> Objective:
    """Next-token cross-entropy at a random recurrence, one draw a step for the whole batch.

    Args:
      draw: draw of the recurrence, `poisson_lognormal` or `exponential`.
      backprop_depth: K, the last recurrences that carry gradient; the config's mean when None.
      remat: whether the backward pass recomputes each recurrence; as the config says when None.

    Returns:
      A loss over batches of `tokens`, `targets` [B, T], `weights` [B, T] and the scalar `step`;
      packed rows have `positions` and `segments` [B, T] too, and no segment sees another.
    """
    depth, remat = settle(network.config, backprop_depth, remat)
    check_chunk(chunk)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        del frozen
        of_recurrence, of_state = jax.random.split(key)
        tokens = batch["tokens"]
        recurrence = recorded_or(batch, "recurrence", lambda: draw(of_recurrence, batch["step"]))
        state = recorded_or(
            batch, "state", lambda: network.initial_state(jax.random.split(of_state, tokens.shape))
        )

        positions = batch.get(
            "positions", jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        )
        mask = masks.segments(batch["segments"]) if "segments" in batch else None
        view = network.view(positions, mask=mask)
        window = network.empty_window(*tokens.shape)
        e, window = network.embed(params, tokens, view, window)
        state = unroll(network, params, state, e, view, recurrence, depth, remat)
        hidden = network.readout(params, state, view, window).hidden
        nll, hits = cross_entropy(scorer(network, params), hidden, batch["targets"], chunk)
        means = {
            "loss": weighted(nll, batch["weights"]),
            "accuracy": weighted(hits, batch["weights"]),
        }
        return means | {"recurrence": drawn(recurrence)}

    return Objective(sums)
