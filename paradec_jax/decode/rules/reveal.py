"""How many positions of a canvas a step reveals: pure functions from scores and clocks to Bool[B, W].

Every rule reveals at least one open position of a row that has one, so that a loop over steps ends.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import select


def quota(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], count: Int[Array, "B"] | int
) -> Bool[Array, "B W"]:
    """The `count` (at least 1) open positions of highest score."""
    return select.top(scores, open_, jnp.maximum(count, 1))


def threshold(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], at_least: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """Open positions whose score reaches `at_least`, and the best one in any case (Fast-dLLM, arXiv 2505.22618)."""
    return select.at_least(scores, open_, at_least) | select.top(scores, open_, 1)


def factor(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], bound: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """The best open positions up to the first rank r (from 1) with `c_r < 1 - bound / (r + 1)`, at least one.

    c_1 >= c_2 >= .. are the open positions' probabilities (Fast-dLLM, arXiv 2505.22618).
    """
    ordered = -jnp.sort(jnp.where(open_, -scores, jnp.inf), axis=1)
    rank = jnp.arange(1, scores.shape[1] + 1)
    count = select.leading_run(ordered >= 1 - bound / (rank + 1))
    return select.top(scores, open_, jnp.maximum(count, 1))


def leading(scores: Float[Array, "B W"], open_: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """The first open position, whatever the scores: left to right."""
    position = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.float32), scores.shape)
    return select.top(-position, open_, 1)


def time_grid(step: Int[Array, "B"], steps: Int[Array, ""] | int, total: Int[Array, "B"]) -> Int[Array, "B"]:
    """Positions that step `step` of `steps` reveals where `total` are to be revealed in equal shares.

    `floor((k + 1) n / N) - floor(k n / N)`, in integers; the sum over k = 0 .. N - 1 is n.
    """
    return (step + 1) * total // steps - step * total // steps
