"""Which positions of a window are finished, given a score for each: pure functions on [B, W].

All take traced numbers, and the lower position wins a tie.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def leading_run(qualified: Bool[Array, "B W"]) -> Int[Array, "B"]:
    """Length of the leading run of positions that qualify: all up to it must."""
    return jnp.sum(jnp.cumprod(qualified.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def leading(qualified: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """The leading run itself."""
    return jnp.cumprod(qualified.astype(jnp.int32), axis=1) > 0


def top(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], quota: Int[Array, "B"] | int
) -> Bool[Array, "B W"]:
    """The `quota` open positions of highest score; all open ones where there are fewer."""
    ranked = jnp.argsort(jnp.where(open_, -scores, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(ranked, axis=1)
    return open_ & (rank < jnp.broadcast_to(jnp.asarray(quota), scores.shape[:1])[:, None])


def at_least(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], threshold: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """Open positions whose score reaches the threshold."""
    return open_ & (scores >= threshold)
