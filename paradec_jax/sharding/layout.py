"""Where the arrays of whole trees lie on a mesh, and the table that says so."""

import math
import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from paradec_jax.sharding import axes
from paradec_jax.sharding.mesh import AnyMesh, check_mesh, placed_on
from paradec_jax.sharding.rules import assign

PyTree = Any
_SAME = re.compile(r"_\d+(?=/|$)")


def shardings(params: PyTree, mesh: AnyMesh) -> PyTree:
    """Where each parameter lies on a mesh, by its logical axes (`sharding.axes`) and the rules
    (`sharding.rules`).

    Args:
      params: parameters of any family, raw or prepared, or shapes of them; those of several
        networks in one tree as well. Arrays that lie on the mesh already stay as they lie.
      mesh: of `make_mesh`; a `jax.sharding.AbstractMesh` where it is a plan.

    Returns:
      A NamedSharding for each, for `jax.device_put`, `jax.jit` or a ShapeDtypeStruct.

    Raises:
      ValueError: a mesh with Explicit axes, or a parameter whose path has no entry in the table of
        axes.
    """
    check_mesh(mesh)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if placed_on(leaf) == mesh:
            return leaf.sharding
        parts, shape = _parts(path), leaf.shape
        names = () if shape == () else _find(parts, shape)  # a number needs no rule
        if names is None:
            raise ValueError(
                f"parameter {'/'.join(parts)} of shape {list(shape)} has no logical axes (sharding.axes), so no rule "
                "says where it lies: put it on the mesh yourself"
            )
        return NamedSharding(mesh, assign(names, shape, mesh.shape)[0])

    return jax.tree_util.tree_map_with_path(place, params)


def shardings_like(tree: PyTree, params: PyTree, placed: PyTree, mesh: AnyMesh) -> PyTree:
    """Where the arrays of a tree lie that holds trees like the parameters': a state, an
    optimizer's, an average.

    An array lies as the parameter whose path ends its own and whose shape it has; every other one
    lies whole on every device (counts, the key, statistics of other shapes). `placed` says where
    the parameters lie, from `shardings`.
    """
    of_params = zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placed), strict=True
    )
    known = {(_parts(path), tuple(leaf.shape)): where for (path, leaf), where in of_params}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts, shape = _parts(path), tuple(leaf.shape)
        ends = (known.get((parts[start:], shape)) for start in range(len(parts)))
        return next((where for where in ends if where is not None), NamedSharding(mesh, P()))

    return jax.tree_util.tree_map_with_path(place, tree)


def layout(params: PyTree, mesh: AnyMesh) -> str:
    """A table for people: where the parameters lie, which rules did not divide an axis, and the
    bytes of a device.

    Parameters of equal names, layers aside, and shapes share a line. Rules that do not divide an
    axis are named for matrices; a vector that lies whole costs little.

    Raises:
      ValueError: what `shardings` refuses.
    """
    lines: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
    total = mine = 0
    placed = jax.tree.leaves(shardings(params, mesh))
    for (path, leaf), where in zip(
        jax.tree_util.tree_leaves_with_path(params), placed, strict=True
    ):
        parts, shape = _parts(path), tuple(leaf.shape)
        size = leaf.dtype.itemsize
        total += math.prod(shape) * size
        mine += math.prod(where.shard_shape(shape)) * size
        names = _find(parts, shape) or tuple(map(str, range(len(shape))))
        missed = assign(names, shape, mesh.shape)[1]
        over = ", ".join(
            f"{name}: {axis if isinstance(axis, str) else ' x '.join(axis)}"
            for name, axis in zip(names, where.spec, strict=False)
            if axis
        )
        matrix = len(shape) > 1 and not parts[-1].endswith("_bias")
        lines[_SAME.sub("_*", "/".join(parts)), shape] = (over, "; ".join(missed) if matrix else "")
    rows = [
        (name, str(list(shape)), over or "whole", why)
        for (name, shape), (over, why) in lines.items()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = [
        "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows
    ]
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    head = f"mesh {sizes}: {mine / 2**20:.1f} of {total / 2**20:.1f} MiB of parameters a device"
    return "\n".join([head, *table])


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _find(parts: tuple[str, ...], shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Logical axes of the parameter whose path, or the longest end of it, is in the table."""
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        names = [entry.names for pattern, entry in axes.EVERY.items() if re.search(pattern, end)]
        if len(names) == 1 and len(names[0]) == len(shape):
            return names[0]
    return None
