"""A function of parameters and rows, computed on each device of a mesh with parameters of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from paradec_jax.sharding.rules import by_rows, copy_by_rows, parts_of_rows


def with_copies(
    function: Callable[[Any, Array], Array], params: Any, rows: int | None = None
) -> Callable[[Array], Array]:
    """`function(params, x)` of vectors x [B, ..., D] as a function of x alone.

    Where so many rows lie over devices, each device has a copy of the parameters for its own. What a call adds to
    their gradient stays there, and devices add theirs up once, after the last call, not after every one.

    Args:
      function: of parameters and of some rows, each of which it treats alone.
      params: the parameters.
      rows: B; unknown when None.
    """
    # Copies of arrays that nothing traces would be made.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
    count = parts_of_rows(rows) if rows is not None and traced else 1
    if count == 1:
        return functools.partial(function, params)
    copies = jax.tree.map(functools.partial(copy_by_rows, count=count), params)

    def split(x: Array) -> Array:
        out = jax.vmap(function)(copies, by_rows(x.reshape(count, -1, *x.shape[1:])))
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return split
