"""From logical axes to axes of the mesh, and constraints on arrays inside programs.

=============  ==========================  =====================================================
axis           lies over                   where that does not divide it
=============  ==========================  =====================================================
rows           data and fsdp               over one of them, else whole
heads          tensor                      whole: heads are never cut
kv_heads       tensor                      whole
vocab, mlp     tensor                      whole
embed          fsdp                        another axis of the parameter: mlp or vocab, else whole
=============  ==========================  =====================================================

`embed_pair` and `conditioning` are as `embed`. Vectors do not lie over fsdp: to gather them costs
more than it saves.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

ROWS = ("data", "fsdp")
# (logical axis, axis of the mesh), in the order in which they are tried on a parameter.
RULES = (
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("embed_pair", "fsdp"),
    ("conditioning", "fsdp"),
    ("mlp", "fsdp"),
    ("vocab", "fsdp"),
)
Sizes = Mapping[str, int]


def assign(
    names: tuple[str, ...], shape: tuple[int, ...], sizes: Sizes
) -> tuple[P, tuple[str, ...]]:
    """Where a parameter of such axes lies, and the rules that do not divide its axes."""
    taken: list[tuple[str, ...]] = [()] * len(names)
    missed = []
    for name, axis in RULES:
        n = sizes.get(axis, 1)
        if n == 1 or name not in names or any(axis in axes for axes in taken):
            continue
        if axis == "fsdp" and len(names) == 1:
            continue
        at = names.index(name)
        if shape[at] % (n * math.prod(sizes[other] for other in taken[at])):
            missed.append(f"{name} {shape[at]} is not a multiple of {axis} {n}")
        else:
            taken[at] = (*taken[at], axis)
    return P(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in taken)), tuple(missed)


def row_axes(count: int, sizes: Sizes) -> tuple[str, ...] | None:
    """Axes over which so many rows lie: data and fsdp, the larger that divides them, or None."""
    alone = sorted(ROWS, key=lambda name: -sizes.get(name, 1))
    for axes in (ROWS, *((name,) for name in alone)):
        present = tuple(name for name in axes if sizes.get(name, 1) > 1)
        if present and count % math.prod(sizes[name] for name in present) == 0:
            return present
    return None


def sizes_in_force() -> dict[str, int]:
    """Sizes of the Auto axes of the traced mesh, those of one device left out."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in axes if kind == AxisType.Auto and size > 1}


def by_rows(x: Any, heads: int | None = None, *, axis: int = 0) -> Any:
    """Constrains an array to lie by rows, along `axis`, and by the heads of axis `heads`; every
    other axis whole.

    Does nothing where nothing is traced, or a program for no mesh.
    """
    sizes = sizes_in_force()
    if not sizes or not isinstance(x, jax.core.Tracer):
        return x
    axes: list[Any] = [None] * x.ndim
    axes[axis] = row_axes(x.shape[axis], sizes)
    tensor = sizes.get("tensor", 1)
    if heads is not None and tensor > 1 and x.shape[heads] % tensor == 0:
        axes[heads] = "tensor"
    return lax.with_sharding_constraint(x, P(*axes))


def whole(x: Any) -> Any:
    """Constrains an array to lie whole on every device; does nothing where `by_rows` does nothing."""
    traced = isinstance(x, jax.core.Tracer)
    return lax.with_sharding_constraint(x, P()) if traced and sizes_in_force() else x


def gathered(weight: Any, dtype: Any, *names: str) -> Any:
    """A matrix that lies over fsdp, cast to the narrower dtype of its products and only then
    gathered.

    Between devices it moves in that dtype, and so does its gradient, which each device gets its
    part of. Does nothing to a matrix that is as narrow, and where nothing is traced for a mesh with
    an axis `fsdp`. Afterwards the matrix is whole or split over `tensor`.
    """
    sizes, dtype = sizes_in_force(), jnp.dtype(dtype)
    narrow = dtype.itemsize < weight.dtype.itemsize
    if not narrow or "fsdp" not in sizes or not isinstance(weight, jax.core.Tracer):
        return weight
    stored, _ = assign(names, weight.shape, sizes)
    after, _ = assign(names, weight.shape, {"tensor": sizes.get("tensor", 1)})
    return _gathered(weight, dtype, stored, after)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(weight: Any, dtype: Any, stored: P, after: P) -> Any:
    return lax.with_sharding_constraint(
        lax.with_sharding_constraint(weight.astype(dtype), stored), after
    )


def _gathered_forward(weight: Any, dtype: Any, stored: P, after: P) -> tuple[Any, Any]:
    return _gathered(weight, dtype, stored, after), jnp.zeros((), weight.dtype)


def _gathered_backward(dtype: Any, stored: P, after: P, like: Any, gradient: Any) -> tuple[Any]:
    """Without a constraint to lie whole, which would sum all of it on every device."""
    del dtype, after
    return (lax.with_sharding_constraint(gradient, stored).astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
