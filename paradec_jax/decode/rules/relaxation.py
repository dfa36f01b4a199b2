"""Tokens with a gradient: the vectors of drawn tokens, relaxed to mixtures."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32

RELAXATIONS = ("straight_through", "soft")


def relaxed(
    table: Float[Array, "V D"],
    logits: Float[Array, "B W V"],
    tokens: Int[Array, "B W"],
    temperature: Float[Array, ""] | float,
    relaxation: str,
) -> Float[Array, "B W D"]:
    """What is added to the vector `E[y]` of each token: `x = p E - E[y]`, or `x - sg(x)` for "straight_through".

    Args:
      table: E, the vector of each token.
      logits: l, of which p = softmax(l / temperature); with Gumbel noise in them, p is a Gumbel-softmax sample.
      tokens: y.
      temperature: tau.
      relaxation: one of `RELAXATIONS`.
    """
    mixed = (jax.nn.softmax(at_least_float32(logits) / temperature, axis=-1) @ table).astype(table.dtype)
    difference = mixed - table[tokens]
    return difference if relaxation == "soft" else difference - lax.stop_gradient(difference)
