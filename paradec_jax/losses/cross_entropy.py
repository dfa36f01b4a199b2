"""Cross-entropies: weighted over a batch, token by token, and to a teacher's distribution."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.nn.precision import at_least_float32


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean negative log-likelihood `sum(w * nll) / sum(w)` in nats, and the weighted top-1 accuracy."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    total = jnp.maximum(jnp.sum(weights), 1e-9)
    hits = jnp.sum(weights * (jnp.argmax(logits, axis=-1) == targets))
    return jnp.sum(weights * nll) / total, hits / total


def token_losses(
    logits: Float[Array, "*shape V"], targets: Int[Array, "*shape"], smoothing: float = 0.0
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Each token's negative log-likelihood in nats, and whether it has the largest logit.

    With label smoothing e: `(1 - e) nll + e mean_v(-log p_v)`.
    """
    log_probs = jax.nn.log_softmax(at_least_float32(logits), axis=-1)
    nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    if smoothing:
        nll = (1 - smoothing) * nll - smoothing * jnp.mean(log_probs, axis=-1)
    return nll, jnp.argmax(logits, axis=-1) == targets


def soft_cross_entropy(
    student: Float[Array, "*shape V"], teacher: Float[Array, "*shape V"], temperature: float = 1.0
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cross-entropy `-sum_v q_v log p_v` of the student p to the teacher q, and the teacher's entropy, in nats.

    Both distributions are softmaxes of logits / temperature. The Kullback-Leibler divergence is the difference
    of the two; the teacher carries no gradient, so its gradient is the cross-entropy's.
    """
    log_q = jax.nn.log_softmax(at_least_float32(lax.stop_gradient(teacher)) / temperature, axis=-1)
    log_p = jax.nn.log_softmax(at_least_float32(student) / temperature, axis=-1)
    q = jnp.exp(log_q)
    return -jnp.sum(q * log_p, axis=-1), -jnp.sum(q * log_q, axis=-1)


def in_chunks(score: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """`score(*arrays)` for arrays [B, K, ...] and results [B, K], made from `chunk` positions at a time.

    The backward pass makes each chunk anew, so logits [B, K, V] never lie in memory whole. Zero: all at once.
    """
    batch, size = arrays[0].shape[:2]
    if not 0 < chunk < size:
        return score(*arrays)
    extra = -size % chunk

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    parts = lax.map(jax.checkpoint(lambda xs: score(*xs)), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :size], parts)
