"""The mesh of devices, and how a call is put on it."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paradec_jax.sharding.rules import row_axes

AnyMesh = Mesh | AbstractMesh  # of devices, or of their numbers alone
AXES = ("data", "fsdp", "tensor")


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with Auto axes `data`, `fsdp` and `tensor`: the compiler chooses shardings between
    constraints.

    Rows of a batch lie over `data` and `fsdp`, parameters over `fsdp` and `tensor`: see
    `sharding.rules`.

    Args:
      data: copies of the parameters that read rows of their own.
      fsdp: devices that share rows and parameters alike.
      tensor: devices that share heads, the inner width of MLPs, and the vocabulary.
      devices: the devices, all of the process's backend when None.

    Raises:
      ValueError: a size that is neither positive nor -1 (the rest), more than one -1, or sizes that
        do not make up the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if (
        any(size < 1 and size != -1 for size in sizes.values())
        or list(sizes.values()).count(-1) > 1
    ):
        raise ValueError(
            f"sizes of a mesh must be at least 1, one of them may be -1 for the rest, not {given}"
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {name: len(devices) // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"{given} do not make up {len(devices)} devices: give other sizes, or fewer devices"
        )
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:
        # The axes of the torus do not make up the mesh's, such as 2 x 32 of 4 x 4 x 4 chips: split
        # them.
        split = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(split, AXES, axis_types=kinds)


def check_mesh(mesh: AnyMesh) -> None:
    """Refuses a mesh with axes that are not Auto. Raises ValueError."""
    other = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Auto
    ]
    if other:
        raise ValueError(
            f"axes {', '.join(map(str, other))} of the mesh are Explicit, as jax.make_mesh makes them by default: "
            f"make it with paradec_jax.make_mesh, or with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)}"
        )


def row_shardings(tree: Any, mesh: AnyMesh) -> Any:
    """Where the arrays of a batch or a request lie: the leading axis by rows where that divides,
    the others whole.

    Raises:
      ValueError: a mesh with Explicit axes.
    """
    check_mesh(mesh)

    def place(leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        rows = row_axes(shape[0], mesh.shape) if shape else None
        return NamedSharding(mesh, P(rows) if rows else P())

    return jax.tree.map(place, tree)


def placed_on(leaf: Any) -> Mesh | None:
    """The mesh that an array lies on; None of what lies on one device, on the host, or is traced."""
    if isinstance(leaf, jax.core.Tracer):
        return None
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def mesh_of(*trees: Any) -> Mesh | None:
    """The mesh of several devices that arrays of the trees lie on; None where there is none, or
    they are traced.

    Raises:
      ValueError: a mesh with axes that are not Auto.
    """
    leaves = jax.tree.leaves(trees)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    meshes = {mesh for mesh in map(placed_on, leaves) if mesh is not None}
    for mesh in meshes:
        check_mesh(mesh)
    return next((mesh for mesh in meshes if mesh.size > 1), None)


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which constraints of `sharding.rules` are about this mesh; the caller's own
    for None.

    While something is traced, a gradient too, JAX takes no mesh, and the caller's own stays in
    force.
    """
    if mesh is None:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(mesh)
    except ValueError:
        return contextlib.nullcontext()
