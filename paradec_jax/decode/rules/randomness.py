"""Keys per request, folded by (purpose, step, position), never by row.

A row therefore draws the same alone, at any place of a batch, or refilled from a queue.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Purpose(enum.IntEnum):
    """What a draw is for."""

    STATE = 0
    TOKEN = 1
    NOISE = 2
    FILLER = 3
    DRAFT = 4
    ACCEPT = 5
    REVEAL = 6
    RESIDUAL = 7


def purpose_keys(keys: Array, purpose: int, step: Int[Array, "B"] | None = None) -> Array:
    """One key a row for a purpose in a step of the row, [B]; a draw folds in its position."""
    if step is None:
        step = jnp.zeros(keys.shape[:1], jnp.int32)
    fold_in = jax.random.fold_in
    return jax.vmap(lambda key, step: fold_in(fold_in(key, purpose), step))(keys, step)


def fold(
    keys: Array, purpose: int, positions: Int[Array, "B W"], step: Int[Array, "B"] | None = None
) -> Array:
    """One key for each row and position, [B, W], from one key a row."""
    each = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    return each(purpose_keys(keys, purpose, step), positions)


def uniform(keys: Array, purpose: int, count: int) -> Float[Array, "B S"]:
    """A number in [0, 1) for each of the first `count` positions of each row."""
    return uniform_at(keys, purpose, jnp.broadcast_to(jnp.arange(count), (*keys.shape, count)))


def uniform_at(
    keys: Array, purpose: int, positions: Int[Array, "B W"], step: Int[Array, "B"] | None = None
) -> Float[Array, "B W"]:
    """A number in [0, 1) for each row and position."""
    return jax.vmap(jax.vmap(jax.random.uniform))(fold(keys, purpose, positions, step))
