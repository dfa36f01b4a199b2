"""The draw of the released programs of masked diffusion: an exponential race of a whole vocabulary,
mask and all.

The mask's column decides whether a position is revealed. In float32 E is 2^-24 or more, so tokens
of small probability lose to the mask more often than they should (arXiv 2409.02908): with many
steps it acts like a lower temperature.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def race(weights: Float[Array, "B W V"], uniforms: Float[Array, "B W V"]) -> Int[Array, "B W"]:
    """`argmax_v q_v / E_v`, `E = 1e-10 - log(u + 1e-10)`, of weights q that need not be normalised.

    A negative weight never beats a positive one.
    """
    return jnp.argmax(weights / (1e-10 - jnp.log(uniforms + 1e-10)), axis=-1).astype(jnp.int32)


def reverse_weights(
    probs: Float[Array, "B W V"], now: Float[Array, "B"], then: Float[Array, "B"], mask: int
) -> Float[Array, "B W V"]:
    """`q_v = p_v (m_t - m_s)`, and `m_s` at the mask, of masked positions in a step from t to s.

    Args:
      probs: of the tokens, 0 at the mask.
      now, then: m_t and m_s, the mask probabilities of both times; m_s may be negative.
      mask: id of the mask.
    """
    weights = probs * (now - then)[:, None, None]
    return weights.at[:, :, mask].set(then[:, None])
