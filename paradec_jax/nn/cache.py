"""Key-value storage addressed by absolute position.

What lies at or beyond the trusted length is scratch: rolling back is lowering a number, and a later write at
the same positions replaces what a rejected draft left there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class KV(NamedTuple):
    """Keys (after bias and rotation) and values; heads stand before positions so that a product over
    positions reads memory in order."""

    k: Float[Array, "*slots B G S C"]
    v: Float[Array, "*slots B G S C"]


def empty(batch: int, heads: int, size: int, head_dim: int, dtype: jnp.dtype, slots: tuple[int, ...] = ()) -> KV:
    """Zeros [*slots, B, G, S, C] for keys and for values, each a buffer of its own."""
    shape = (*slots, batch, heads, size, head_dim)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_rows(
    buffer: Float[Array, "*slots B G S C"], window: Float[Array, "*slots B G W C"], at: Int[Array, "B"]
) -> Float[Array, "*slots B G S C"]:
    """Writes each row's window at its own position, touching only the W positions written.

    `dynamic_update_slice` clamps silently, so the buffer must have room for `at + W`.
    """
    if buffer.shape[-4] == 1:  # one row needs no scatter
        start = (0,) * (buffer.ndim - 2) + (at[0], 0)
        return lax.dynamic_update_slice(buffer, window, start)
    update = jax.vmap(
        lambda row, new, position: lax.dynamic_update_slice(
            row, new, (0,) * (row.ndim - 2) + (position, 0)
        ),
        in_axes=(-4, -4, 0),
        out_axes=-4,
    )
    return update(buffer, window, at)


def write(cache: KV, window: KV, at: Int[Array, "B"]) -> KV:
    """Writes the keys and values of a window at positions `at .. at + W - 1` of each row."""
    return KV(write_rows(cache.k, window.k, at), write_rows(cache.v, window.v, at))
