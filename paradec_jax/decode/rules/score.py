"""How sure a position is: pure functions from logits or latents to one number a position.

`score` and `select` together say which positions are finished; every decoder shares them. All
numbers are at least float32. `shaped` gives the logits of the distribution that a paper's
confidence is taken from.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import check_words
from paradec_jax.decode.rules.sampling import filtered_logits, filters, tempered
from paradec_jax.nn.precision import at_least_float32

CONFIDENCES = ("raw", "tempered", "filtered")
EPSILON = 1e-10
FLOOR = 0.1  # of `min_p_log_probs`, a share of the largest probability


def shaped(
    logits: Float[Array, "*shape V"], confidence: str, knobs: Any, *, top_p_rule: str
) -> Float[Array, "*shape V"]:
    """Logits z of the distribution that a confidence is taken from.

    ::

        raw        softmax(z)                                   LLaDA, Fast-dLLM, Prophet, WINO
        tempered   softmax(z / T)                               SDAR, JetEngine
        filtered   softmax(z / T) after top-k, top-p, min-p     Dream

    At temperature 0, where z is not divided, filters count nevertheless, as in Dream. All three are
    the same at temperature 1 without filters.
    """
    if confidence == "raw":
        return at_least_float32(logits)
    if confidence == "tempered":
        return tempered(logits, knobs.temperature)
    some = filters(knobs, logits.shape[-1])
    with_filters = functools.partial(filtered_logits, knobs=knobs, top_p_rule=top_p_rule)
    without = functools.partial(tempered, temperature=knobs.temperature)
    return lax.cond(some, with_filters, without, logits)


def check_confidence(decoder: Any) -> None:
    """Refuses a field `confidence` that is neither None nor one of `CONFIDENCES`. Raises
    ValueError.
    """
    if decoder.confidence is not None:
        check_words(decoder, confidence=CONFIDENCES)


def probability(
    logits: Float[Array, "*shape V"], tokens: Int[Array, "*shape"] | None = None
) -> Float[Array, "*shape"]:
    """Probability of the most probable token, or of `tokens`."""
    probs = jax.nn.softmax(at_least_float32(logits), axis=-1)
    if tokens is None:
        return jnp.max(probs, axis=-1)
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def margin(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Difference between the two largest probabilities (Dream's "topk_margin")."""
    return gap(jax.nn.softmax(at_least_float32(logits), axis=-1))


def gap(x: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Difference between the two largest numbers, of logits Prophet's (arXiv 2508.19982)."""
    x = at_least_float32(x)
    # By maxima: XLA gathers sharded rows for `top_k`.
    best = jnp.argmax(x, axis=-1, keepdims=True)
    others = jnp.where(jnp.arange(x.shape[-1]) == best, -jnp.inf, x)
    return jnp.max(x, axis=-1) - jnp.max(others, axis=-1)


def entropy(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Entropy `-sum p log(p + 1e-10)` of the next-token distribution, in nats."""
    probs = jax.nn.softmax(at_least_float32(logits), axis=-1)
    return -jnp.sum(probs * jnp.log(probs + EPSILON), axis=-1)


def norm(x: Float[Array, "*shape D"]) -> Float[Array, "*shape"]:
    """Euclidean norm, with a gradient of zero where the vector is zero (a state that stands still)."""
    squared = jnp.sum(jnp.square(x), axis=-1)
    moves = squared > 0
    return jnp.where(moves, jnp.sqrt(jnp.where(moves, squared, 1.0)), 0.0)


def latent_change(
    new: Float[Array, "*shape D"], old: Float[Array, "*shape D"]
) -> Float[Array, "*shape"]:
    """Relative change `|s - s'| / |s|` of a latent state."""
    new, old = at_least_float32(new), at_least_float32(old)
    return norm(new - old) / jnp.maximum(norm(new), EPSILON)


def cosine_change(
    new: Float[Array, "*shape D"], old: Float[Array, "*shape D"]
) -> Float[Array, "*shape"]:
    """`1 - cos(s, s')` of two latent states."""
    new, old = at_least_float32(new), at_least_float32(old)
    norms = norm(new) * norm(old)
    return 1 - jnp.sum(new * old, axis=-1) / jnp.maximum(norms, EPSILON)


def kl_divergence(
    old: Float[Array, "*shape V"], new: Float[Array, "*shape V"]
) -> Float[Array, "*shape"]:
    """`KL(p_old || p_new)` of two log-probability vectors, in nats."""
    return jnp.sum(jnp.exp(old) * (old - new), axis=-1)


def min_p_log_probs(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """Log-probabilities after every one below `FLOOR * max` was set to 1/V and all were
    renormalised.
    """
    probs = jax.nn.softmax(at_least_float32(logits), axis=-1)
    low = probs < FLOOR * jnp.max(probs, axis=-1, keepdims=True)
    probs = jnp.where(low, 1.0 / logits.shape[-1], probs)
    return jnp.log(probs / jnp.sum(probs, axis=-1, keepdims=True))
