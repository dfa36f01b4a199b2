"""Tokens with a gradient: the vectors of drawn tokens, relaxed to mixtures."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import divided, filtered_logits, gumbel, is_hot
from paradec_jax.nn.precision import at_least_float32

RELAXATIONS = ("straight_through", "soft")


def relaxed(
    table: Float[Array, "V D"],
    logits: Float[Array, "B W V"],
    tokens: Int[Array, "B W"],
    temperature: Float[Array, ""] | float,
    relaxation: str,
) -> Float[Array, "B W D"]:
    """What is added to the vector `E[y]` of each token: `x = p E - E[y]`, or `x - sg(x)` for
    "straight_through".

    Args:
      table: E, the vector of each token.
      logits: l, of which p = softmax(l / temperature); with Gumbel noise in them, p is a
        Gumbel-softmax sample.
      tokens: y.
      temperature: tau.
      relaxation: one of `RELAXATIONS`.
    """
    mixed = (jax.nn.softmax(divided(logits, temperature), axis=-1) @ table).astype(table.dtype)
    difference = mixed - table[tokens]
    return difference if relaxation == "soft" else difference - lax.stop_gradient(difference)


def noisy(
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    keys: Array,
    knobs: Any,
    *,
    top_p_rule: str,
    greedy: bool = False,
    step: Int[Array, "B"] | None = None,
) -> Float[Array, "B W V"]:
    """The scores whose greatest is the token that `sampling.sample` draws: `log p + g`, the logits
    at temperature 0.

    With `greedy` nothing is drawn, whatever the temperature.
    """
    plain = at_least_float32(logits)
    if greedy:
        return plain
    logs = filtered_logits(logits, knobs, top_p_rule=top_p_rule)
    drawn = logs + gumbel(fold(keys, Purpose.TOKEN, positions, step), logits.shape[-1])
    return jnp.where(is_hot(knobs.temperature), drawn, plain)
