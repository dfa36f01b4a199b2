"""The parameterisation SUBS (Sahoo et al. 2024, arXiv 2406.07524): no token is the mask, known
tokens stay.

The mask's column is lowered by a finite number: its probability is exactly 0 in float32, and
products such as `p (log p - log q)` stay finite there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32

RULED_OUT = -1e6


def without_mask(logits: Float[Array, "*shape V"], mask: Any) -> Float[Array, "*shape V"]:
    """Scores in at least float32, the mask's column `mask` lowered by a million; -inf there if it
    is not finite.
    """
    logits = at_least_float32(logits)
    lowered = jnp.where(jnp.isfinite(logits), logits + RULED_OUT, -jnp.inf)
    return jnp.where(jnp.arange(logits.shape[-1]) == mask, lowered, logits)


def scores_of(network: Any, logits: Float[Array, "*shape V"], mask: Any) -> Array:
    """Scores of the clean tokens: `without_mask` of a network that is defined by SUBS, else the
    logits themselves.
    """
    return without_mask(logits, mask) if network.subs else logits


def subs(
    logits: Float[Array, "*shape V"], tokens: Int[Array, "*shape"], mask: Any
) -> Float[Array, "*shape V"]:
    """Log-probabilities of the clean tokens, given the canvas `tokens` that a denoiser read, in at
    least float32.

    ::

        tokens[p] = mask     log_softmax(without_mask(logits[p]))
        else                 0 at tokens[p], -1e6 everywhere else
    """
    log_probs = jax.nn.log_softmax(without_mask(logits, mask), axis=-1)
    own = jnp.arange(logits.shape[-1]) == tokens[..., None]
    known = jnp.where(own, 0.0, RULED_OUT).astype(log_probs.dtype)
    return jnp.where((tokens == mask)[..., None], log_probs, known)
