"""Noise in latent states (arXiv 2510.14961, Eq. 2)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32

NOISE_MIXERS = ("dampened", "constant", "sqrt")


def mix_noise(
    z: Float[Array, "B W D"],
    noise: Float[Array, "B W D"],
    share: Any,
    seen: Int[Array, "B W"],
    mixer: str,
) -> Float[Array, "B W D"]:
    """`(1 - b) z + b g`, or `sqrt(1 - b) z + sqrt(b) g` for the mixer "sqrt".

    Args:
      z, noise: states, and g, drawn like initial states.
      share: beta, one for all or one a position. b is beta for "constant", else `beta / (1 + n)`.
      seen: n, recurrences that each position has done.
      mixer: one of `NOISE_MIXERS`.
    """
    share = at_least_float32(jnp.asarray(share))
    if mixer != "constant":
        share = share / (1 + seen)
    share = jnp.broadcast_to(share, seen.shape)[..., None]
    keep = 1 - share
    if mixer == "sqrt":
        keep, share = jnp.sqrt(jnp.maximum(keep, 0)), jnp.sqrt(share)
    return (keep * z + share * noise).astype(z.dtype)
