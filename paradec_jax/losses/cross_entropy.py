"""Weighted next-token cross-entropy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean negative log-likelihood `sum(w * nll) / sum(w)` in nats, and the weighted top-1 accuracy."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    total = jnp.maximum(jnp.sum(weights), 1e-9)
    hits = jnp.sum(weights * (jnp.argmax(logits, axis=-1) == targets))
    return jnp.sum(weights * nll) / total, hits / total
