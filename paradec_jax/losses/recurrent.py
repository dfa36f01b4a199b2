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
from paradec_jax.losses.cross_entropy import cross_entropy, scorer
from paradec_jax.losses.next_token import packing
from paradec_jax.losses.recorded import recorded_or
from paradec_jax.objective import Batch, Objective, Sums, drawn, weighted

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
        # tau ~ N(ln M - sigma^2 / 2, sigma), lambda = e^tau
        rate = jnp.exp(jnp.log(_at(mean, step)) - SIGMA**2 / 2 + SIGMA * normal)
        # r ~ Poisson(lambda) + 1
        return jax.random.poisson(of_count, rate).astype(jnp.int32) + 1

    return draw


def exponential(mean: Mean) -> Draw:
    """Draws `r = max(1, round(Exp(M)))`, Exp(M) as in arXiv 2510.14961, C.6."""

    def draw(key: Array, step: Array) -> Array:
        recurrence = jnp.round(_at(mean, step) * jax.random.exponential(key))
        return jnp.maximum(1, recurrence).astype(jnp.int32)

    return draw


def settle(
    config: RecurrentDepthConfig, backprop_depth: int | None, remat: bool | None
) -> tuple[int, bool]:
    """Backpropagated recurrences and rematerialisation of a loss, the config's where None."""
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
    """Iterates the core `recurrence` times; only the last `backprop_depth` steps carry gradient
    (section 3 of the paper: truncated backpropagation).

    The first `n = max(r - K, 0)` steps run in a dynamic loop on constants, the last `k = min(r, K)`
    in a scan of K steps whose first K - k are skipped, so that one program serves every r. The
    prelude output e carries gradient through the last k steps alone.
    """
    window = network.empty_window(*state.shape[:2])

    def iterate(params: Any, state: Array, e: Array) -> Array:
        return network.iterate(params, state, e, view, window, 0)[0]

    step = jax.checkpoint(iterate) if remat else iterate
    # The first n = max(r - K, 0) recurrences: of constants.
    params_, e_, state = lax.stop_gradient((params, e, state))
    constant_steps = jnp.maximum(recurrence - backprop_depth, 0)
    state = lax.fori_loop(0, constant_steps, lambda _, s: iterate(params_, s, e_), state)
    # The last k = min(r, K), which carry gradient.
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

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        of_recurrence, of_state = jax.random.split(key)
        tokens, weights = batch["tokens"], batch["weights"]
        # r, and s_0
        recurrence = recorded_or(batch, "recurrence", lambda: draw(of_recurrence, batch["step"]))
        state = recorded_or(
            batch, "state", lambda: network.initial_state(jax.random.split(of_state, tokens.shape))
        )
        positions, mask = packing(batch)
        view = network.view(positions, mask=mask)
        # e = P(x)
        e, window = network.embed(params, tokens, view, network.empty_window(*tokens.shape))
        # s_i = R(e, s_{i-1}), i = 1 .. r
        state = unroll(network, params, state, e, view, recurrence, depth, remat)
        # p = C(s_r)
        hidden = network.readout(params, state, view, window).hidden
        nll, hits = cross_entropy(scorer(network, params), hidden, batch["targets"], chunk)
        return {
            "loss": weighted(nll, weights),
            "accuracy": weighted(hits, weights),
            "recurrence": drawn(recurrence),
        }

    return Objective(sums)
