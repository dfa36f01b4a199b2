"""Rotary position embedding, over interleaved pairs of channels or over the two halves of a head.

Frequencies w of the pairs of channels, w_i = base^(-2i/C) for i = 0 .. C/2-1, may be scaled for
texts s times longer than those of L positions that a model was first trained on. The formulas are
those of transformers 5.

::

    linear   w / s (position interpolation, arXiv 2306.15595)
    dynamic  w of the base `base (s n / L - s + 1)^(C / (C - 2))` for a text of n > L positions, else w
    llama3   w / s where a pair makes fewer than `low` rotations in L positions, w where more than
             `high`, between them `(1 - r) w / s + r w`, r rising linearly in the rotations L w / 2 pi
             (Llama 3.1)
    yarn     `r w / s + (1 - r) w`, r rising linearly in i from 0, at the pair that makes `beta_fast`
             rotations in L positions, to 1, at that of `beta_slow`; cosines and sines are multiplied
             by a number (arXiv 2309.00071)

With "dynamic" position p turns by the frequencies of a text of n = p + 1 positions, whatever
follows it. Where a prompt has at most L positions, this is what transformers does one by one with a
cache. It turns all positions of a call that reads beyond L, such as a longer prompt, by the
frequencies of the last: such texts have other scores there.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import RopeScaling
from paradec_jax.nn.precision import at_least_float32


class Rotation(NamedTuple):
    """Cosines and sines of the angles of a window, float32 [B, 1, W, C/2]."""

    cos: Float[Array, "B 1 W half"]
    sin: Float[Array, "B 1 W half"]


def rotation(
    positions: Int[Array, "B W"], head_dim: int, base: float, scaling: RopeScaling | None = None
) -> Rotation:
    """Angles `position * base^(-2i/C)`, i = 0 .. C/2-1, frequencies in float32, scaled as above."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    power: Any = base
    if scaling is not None and scaling.kind == "dynamic":
        beyond = jnp.maximum((positions[:, None, :, None] + 1) / scaling.original - 1, 0)
        power = base * (1 + scaling.factor * beyond) ** (head_dim / (head_dim - 2))
    inverse_frequency = 1.0 / (power**exponent)
    if scaling is not None and scaling.kind != "dynamic":
        inverse_frequency = _scaled(inverse_frequency, base, scaling)
    angle = positions[:, None, :, None].astype(jnp.float32) * inverse_frequency
    if scaling is None:
        return Rotation(jnp.cos(angle), jnp.sin(angle))
    return Rotation(jnp.cos(angle) * scaling.amplitude, jnp.sin(angle) * scaling.amplitude)


def _scaled(w: Float[Array, "half"], base: float, scaling: RopeScaling) -> Float[Array, "half"]:
    """Frequencies of the pairs of channels after scaling that does not depend on the position."""
    slow, length = w / scaling.factor, scaling.original
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        low, high = float(scaling.low_freq_factor or 0), float(scaling.high_freq_factor or 0)
        r = jnp.clip((length * w / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - r) * slow + r * w

    def pair(rotations: float) -> float:
        """Number i of the pair that makes so many rotations in L positions."""
        return len(w) * math.log(length / (rotations * 2 * math.pi)) / math.log(base)

    first, last = pair(scaling.beta_fast or 32), pair(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(w) - 1)
    r = jnp.clip((jnp.arange(len(w)) - first) / (last - first or 0.001), 0, 1)
    return r * slow + (1 - r) * w


def rotate(x: Float[Array, "B H W C"], angles: Rotation) -> Float[Array, "B H W C"]:
    """Turns channels (2i, 2i+1): `(a, b) -> (a cos - b sin, b cos + a sin)`, in float32 or wider."""
    pairs = at_least_float32(x).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_halves(x: Float[Array, "B H W C"], angles: Rotation) -> Float[Array, "B H W C"]:
    """Turns channels (i, i + C/2), the convention of Llama and Qwen, in float32 or wider."""
    a, b = jnp.split(at_least_float32(x), 2, axis=-1)
    turned = jnp.concatenate(
        [a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin], axis=-1
    )
    return turned.astype(x.dtype)
