"""Weights of few bits."""

from typing import Any

import jax
import jax.numpy as jnp


def rounded(params: Any, bits: int) -> Any:
    """Parameters with `bits` significant bits each, in their own dtype."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(leaf)
        return jnp.ldexp(jnp.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(leaf.dtype)

    return params if bits >= 24 else jax.tree.map(of_leaf, params)
