"""Rotary position embedding, over interleaved pairs of channels or over the two halves of a head."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32


class Rotation(NamedTuple):
    """Cosines and sines of the angles of a window, float32 [B, 1, W, C/2]."""

    cos: Float[Array, "B 1 W half"]
    sin: Float[Array, "B 1 W half"]


def rotation(positions: Int[Array, "B W"], head_dim: int, base: float) -> Rotation:
    """Angles `position * base^(-2i/C)`, i = 0 .. C/2-1, with inverse frequencies in float32."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    inverse_frequency = 1.0 / (base**exponent)
    angle = positions[:, None, :, None].astype(jnp.float32) * inverse_frequency
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B H W C"], angles: Rotation) -> Float[Array, "B H W C"]:
    """Turns each pair of channels (2i, 2i+1): `(a, b) -> (a cos - b sin, b cos + a sin)`, in at least float32."""
    pairs = at_least_float32(x).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_halves(x: Float[Array, "B H W C"], angles: Rotation) -> Float[Array, "B H W C"]:
    """Turns the pairs of channels (i, i + C/2), the convention of Llama and Qwen, in at least float32."""
    a, b = jnp.split(at_least_float32(x), 2, axis=-1)
    turned = jnp.concatenate([a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin], axis=-1)
    return turned.astype(x.dtype)
