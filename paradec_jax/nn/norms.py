"""Normalisation layers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*shape D"], gain: Float[Array, "D"], eps: float) -> Float[Array, "*shape D"]:
    """Root-mean-square norm, `x / sqrt(mean(x^2) + eps) * gain`.

    The statistics are float32 and the quotient returns to the dtype of `x` before the gain multiplies it.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * gain.astype(x.dtype)
