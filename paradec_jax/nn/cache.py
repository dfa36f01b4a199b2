"""Key-value storage addressed by absolute position.

What lies at or beyond the trusted length is scratch: rolling back is lowering a number, and a later
write at the same positions replaces what a rejected draft left there.

Rows lead, before any other axis. XLA writes a window into each row at its own position by a
scatter, and scatters along the leading axis: with other axes before the rows it would transpose the
whole buffer, there and back.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.nn.backend import cpu_layouts
from paradec_jax.sharding.rules import by_rows


class KV(NamedTuple):
    """Keys (after bias and rotation) and values of S positions.

    Each lies as its product wants it, keys as columns and values as rows, on every backend. The
    measurement behind it is the CPU's: with keys as rows its backend transposes the whole cache in
    every layer of every step.
    """

    k: Float[Array, "B *slots G C S"]
    v: Float[Array, "B *slots G S C"]


Layers = tuple[KV, ...]  # of every layer


def stored(dtype: str) -> jnp.dtype:
    """Dtype in which a cache holds numbers of `dtype`: the same, but float32 for bfloat16 on the
    CPU (`nn.backend`).

    To read or write a part of a bfloat16 array, XLA's CPU backend casts all of it to float32 and
    back.
    """
    return jnp.dtype("float32" if dtype == "bfloat16" and cpu_layouts() else dtype)


def empty(
    batch: int, heads: int, size: int, head_dim: int, dtype: jnp.dtype, slots: tuple[int, ...] = ()
) -> KV:
    """Zeros for `size` positions; on a mesh by rows and heads."""
    rows = (batch, *slots, heads)
    return on_mesh(
        KV(jnp.zeros((*rows, head_dim, size), dtype), jnp.zeros((*rows, size, head_dim), dtype))
    )


def on_mesh(cache: KV) -> KV:
    """The same keys and values, on a mesh by rows and heads (`sharding.rules`)."""
    return KV(*(by_rows(x, heads=x.ndim - 3) for x in cache))


def write_rows(
    buffer: Float[Array, "B *slots G _ _"],
    window: Float[Array, "B *slots G _ _"],
    at: Int[Array, "B"],
    axis: int,
) -> Float[Array, "B *slots G _ _"]:
    """Writes each row's window at its own position along `axis` (-1 or -2), touching only what is
    written.

    `dynamic_update_slice` clamps silently, so the buffer must have room for `at + W`.
    """

    def update(row: Array, new: Array, position: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(row, new.astype(row.dtype), position, axis)

    if buffer.shape[0] == 1:  # one row needs no scatter
        return update(buffer, window, at[0])
    return jax.vmap(update)(buffer, window, at)


def write(cache: KV, window: KV, at: Int[Array, "B"]) -> KV:
    """Writes the keys and values of a window at positions `at .. at + W - 1` of each row."""
    return on_mesh(KV(write_rows(cache.k, window.k, at, -1), write_rows(cache.v, window.v, at, -2)))


def widen(window: KV, width: int) -> KV:
    """The window with zeros after its positions, up to `width`."""
    extra = width - window.v.shape[-2]
    rows = [(0, 0)] * (window.v.ndim - 2)
    return KV(
        jnp.pad(window.k, [*rows, (0, 0), (0, extra)]),
        jnp.pad(window.v, [*rows, (0, extra), (0, 0)]),
    )


def pick(window: KV, start: Int[Array, "B"], width: int) -> KV:
    """Positions `start .. start + width - 1` of each row's window, as of one candidate."""

    def of_row(k: Array, v: Array, at: Array) -> tuple[Array, Array]:
        return (
            lax.dynamic_slice_in_dim(k, at, width, -1),
            lax.dynamic_slice_in_dim(v, at, width, -2),
        )

    return KV(*jax.vmap(of_row)(*window, start))


def take(window: KV, slots: Int[Array, "B _"]) -> KV:
    """These positions of each row's window, in this order; zeros for one that is not in it."""

    zero = functools.partial(jnp.take, mode="fill", fill_value=0)
    keys = jax.vmap(functools.partial(zero, axis=-1))(window.k, slots)
    return KV(keys, jax.vmap(functools.partial(zero, axis=-2))(window.v, slots))


def each_kv(change: Callable[..., KV], tree: Any, *others: Any) -> Any:
    """A tree with each KV changed, given those of trees like it beside it; other leaves stay."""

    def changed(x: Any, *rest: Any) -> Any:
        return change(x, *rest) if isinstance(x, KV) else x

    return jax.tree.map(changed, tree, *others, is_leaf=lambda x: isinstance(x, KV))


def size(tree: Any) -> int:
    """S, positions that the KVs of a tree have room for."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KV))
    return next(leaf.v.shape[-2] for leaf in leaves if isinstance(leaf, KV))
