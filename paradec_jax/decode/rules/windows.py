"""Windows of row buffers: cut out, shifted, written, chosen row by row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped


def window(
    rows: Shaped[Array, "B S *rest"], at: Int[Array, "B"], width: int
) -> Shaped[Array, "B W *rest"]:
    """Positions `at .. at + width - 1` of each row."""
    return jax.vmap(lambda row, p: lax.dynamic_slice_in_dim(row, p, width))(rows, at)


def number_of(where: Bool[Array, "B S"]) -> Int[Array, "B"]:
    """How many positions of each row these are."""
    return jnp.sum(where, axis=1, dtype=jnp.int32)


def positions_of(rows: Shaped[Array, "B S *rest"]) -> Int[Array, "B S"]:
    """Positions 0 .. S-1 of every row."""
    return jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape[:2])


def shift(
    x: Shaped[Array, "B _ *rest"], by: Int[Array, "B"], width: int | None = None
) -> Shaped[Array, "B W *rest"]:
    """Slots `by .. by + width - 1` of each row (by default as many as there are), zeros after the
    last.
    """
    slots = x.shape[1]
    room = jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    return window(room, jnp.minimum(by, slots), slots if width is None else width)


def pad_slots(x: Shaped[Array, "B ..."], *widths: int) -> Shaped[Array, "B ..."]:
    """Each row with zeros after it, up to these sizes of the axes after that of rows."""
    extra = [(0, width - size) for width, size in zip(widths, x.shape[1:], strict=False)]
    return jnp.pad(x, [(0, 0), *extra, *[(0, 0)] * (x.ndim - 1 - len(widths))])


def put(
    rows: Shaped[Array, "B S *rest"],
    new: Shaped[Array, "B W *rest"],
    at: Int[Array, "B"],
    where: Bool[Array, "B W"],
) -> Shaped[Array, "B S *rest"]:
    """`rows` with `new[i]` at position `at + i` where `where[i]`; only the window is touched."""

    def of_row(row: Array, new: Array, at: Array, where: Array) -> Array:
        old = lax.dynamic_slice_in_dim(row, at, len(new))
        kept = jnp.where(where.reshape(-1, *(1,) * (row.ndim - 1)), new, old)
        return lax.dynamic_update_slice_in_dim(row, kept.astype(row.dtype), at, 0)

    return jax.vmap(of_row)(rows, new, at, where)


def where_rows(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Leaves [B, ...] of `new` in these rows, of `old` in the others."""
    return jax.tree.map(
        lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old), new, old
    )


def entry_of(tree: Any, index: Int[Array, "B"]) -> Any:
    """Entry `index` of each row, leaves [B, ...] of leaves [B, R, ...]."""
    return jax.vmap(lambda row, at: jax.tree.map(lambda x: x[at], row))(tree, index)


def last_of(hidden: Shaped[Array, "B P D"], lengths: Int[Array, "B"]) -> Shaped[Array, "B 1 D"]:
    """Entry `lengths - 1` of each row."""
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)


def write_after_read(at: Int[Array, "B"], tokens: Int[Array, "B W"]) -> Int[Array, "B"]:
    """`at`, made to depend on tokens that were computed from the cache.

    A write at `at` then comes after every read of the old cache, so XLA updates it in place;
    otherwise it copies the whole cache, twice a step. Token ids are never negative, which XLA does
    not know, so nothing changes.
    """
    return at - jnp.minimum(jnp.min(tokens, axis=1), 0)
