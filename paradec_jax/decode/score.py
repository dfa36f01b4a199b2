"""How sure a position is: pure functions from logits or latents to one number a position.

`score` and `select` together say which positions are finished; every decoder shares them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-10


def probability(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Probability of the most probable token."""
    return jnp.max(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=-1)


def margin(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Difference between the two largest probabilities."""
    top = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), 2)[0]
    return top[..., 0] - top[..., 1]


def entropy(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """Entropy `-sum p log(p + 1e-10)` of the next-token distribution, in nats."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(probs * jnp.log(probs + EPSILON), axis=-1)


def latent_change(new: Float[Array, "*shape D"], old: Float[Array, "*shape D"]) -> Float[Array, "*shape"]:
    """Relative change `|s - s'| / |s|` of a latent state, in float32."""
    new, old = new.astype(jnp.float32), old.astype(jnp.float32)
    return jnp.linalg.norm(new - old, axis=-1) / jnp.maximum(jnp.linalg.norm(new, axis=-1), EPSILON)


def cosine_change(new: Float[Array, "*shape D"], old: Float[Array, "*shape D"]) -> Float[Array, "*shape"]:
    """`1 - cos(s, s')` of two latent states, in float32."""
    new, old = new.astype(jnp.float32), old.astype(jnp.float32)
    norms = jnp.linalg.norm(new, axis=-1) * jnp.linalg.norm(old, axis=-1)
    return 1 - jnp.sum(new * old, axis=-1) / jnp.maximum(norms, EPSILON)


def kl_divergence(old: Float[Array, "*shape V"], new: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """`KL(p_old || p_new)` of two log-probability vectors, in nats."""
    return jnp.sum(jnp.exp(old) * (old - new), axis=-1)


def min_p_log_probs(logits: Float[Array, "*shape V"], floor: float = 0.1) -> Float[Array, "*shape V"]:
    """Log-probabilities after every one below `floor * max` was set to 1/V and all were renormalised."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    low = probs < floor * jnp.max(probs, axis=-1, keepdims=True)
    probs = jnp.where(low, 1.0 / logits.shape[-1], probs)
    return jnp.log(probs / jnp.sum(probs, axis=-1, keepdims=True))
