"""Noise in latent states (arXiv 2510.14961, Eq. 2)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32

NOISE_SCHEDULES = ("dampened", "constant")
NOISE_MIXINGS = ("linear", "sqrt")


def mix_noise(
    z: Float[Array, "B W D"],
    noise: Float[Array, "B W D"],
    share: Any,
    recurrences: Int[Array, "B W"],
    schedule: str,
    mixing: str,
) -> Float[Array, "B W D"]:
    """`(1 - b) z + b g`, or `sqrt(1 - b) z + sqrt(b) g` where `mixing` is "sqrt".

    Args:
      z, noise: states, and g, drawn like initial states.
      share: beta, one for all or one a position.
      recurrences: n, recurrences that each position has done.
      schedule: one of `NOISE_SCHEDULES`: b is `beta / (1 + n)` ("dampened") or beta ("constant").
      mixing: one of `NOISE_MIXINGS`: as values ("linear") or as variances ("sqrt").
    """
    share = at_least_float32(jnp.asarray(share))
    if schedule == "dampened":
        share = share / (1 + recurrences)
    share = jnp.broadcast_to(share, recurrences.shape)[..., None]
    keep = 1 - share
    if mixing == "sqrt":
        keep, share = jnp.sqrt(jnp.maximum(keep, 0)), jnp.sqrt(share)
    return (keep * z + share * noise).astype(z.dtype)
