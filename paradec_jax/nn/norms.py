"""Normalisation layers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from paradec_jax.nn.precision import at_least_float32


def rms_norm(x: Float[Array, "*shape D"], gain: Float[Array, "D"], eps: float) -> Float[Array, "*shape D"]:
    """Root-mean-square norm, `x / sqrt(mean(x^2) + eps) * gain`.

    The statistics are at least float32 and the quotient returns to the dtype of `x` before the gain multiplies it.
    """
    wide = at_least_float32(x)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*shape D"], gain: Float[Array, "... D"], eps: float
) -> Float[Array, "*shape D"]:
    """Layer norm without a bias, `(x - mean(x)) / sqrt(var(x) + eps) * gain`, in at least float32."""
    wide = at_least_float32(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps) * gain
