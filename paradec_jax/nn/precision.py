"""The dtype of norms, softmax and log-probabilities."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def at_least_float32(x: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` in float32, or in float64 where it is float64 already, as where gradients are checked."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
