"""Knobs that depend on how many steps a position, or its block, has done."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scheduled = Float[Array, "..."] | float  # a number, or a schedule [K]


def at_age(knob: Any, age: Int[Array, "*shape"]) -> Array:
    """`knob[min(age, K - 1)]` of a schedule [K], of the shape of `age`; a number stays that number at every age.

    Args:
      knob: a number, or one value for each age; the last one holds for all later ages.
      age: steps done.
    """
    knob = jnp.asarray(knob)
    return knob if knob.ndim == 0 else knob[jnp.minimum(age, knob.shape[0] - 1)]
