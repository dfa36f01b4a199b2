"""Which positions are finished, given which ones qualify: pure functions on [B, W]."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def threshold(scores: Float[Array, "B W"], at_least: Float[Array, ""] | float) -> Bool[Array, "B W"]:
    """Positions whose score reaches the threshold."""
    return scores >= at_least


def prefix(qualified: Bool[Array, "B W"]) -> Int[Array, "B"]:
    """Length of the leading run of positions that qualify: all up to it must."""
    return jnp.sum(jnp.cumprod(qualified.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
