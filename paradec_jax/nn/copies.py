"""A function of parameters and rows, computed on each device of a mesh with parameters of its own."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from paradec_jax.sharding.rules import by_rows, row_axes, sizes_in_force


def with_copies(
    function: Callable[[Any, Array], Array], params: Any, rows: int | None = None
) -> Callable[[Array], Array]:
    """`function(params, x)` of vectors x [B, ..., D] as a function of x alone.

    Where so many rows lie over devices, each device has a copy of the parameters for its own. What
    a call adds to their gradient stays there, and devices add theirs up once, after the last call,
    not after every one.

    The function treats each row alone; `rows` is B, unknown when None.
    """
    # Copies of arrays that nothing traces would be made.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
    over = row_axes(rows, sizes := sizes_in_force()) if rows is not None and traced else None
    if over is None:
        return functools.partial(function, params)
    count = math.prod(sizes[name] for name in over)

    def copied(x: Any) -> Any:
        """So many copies on a new leading axis, which lies as the rows do: one where its rows are."""
        spec = P(row_axes(count, sizes), *[P.UNCONSTRAINED] * jnp.ndim(x))
        return lax.with_sharding_constraint(jnp.broadcast_to(x, (count, *jnp.shape(x))), spec)

    copies = jax.tree.map(copied, params)

    def split(x: Array) -> Array:
        out = jax.vmap(function)(copies, by_rows(x.reshape(count, -1, *x.shape[1:])))
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return split
