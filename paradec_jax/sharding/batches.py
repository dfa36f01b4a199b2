"""The mesh of a computation, and batches on it: by rows, of all processes."""

from typing import Any

import jax
from jax.sharding import Mesh

from paradec_jax.sharding.mesh import check_mesh, mesh_of, placed_on, row_shardings
from paradec_jax.sharding.processes import check_whole, put

PyTree = Any


def mesh_for(mesh: Mesh | None, tree: PyTree) -> Mesh | None:
    """The given mesh, or else the one that arrays of the tree lie on; None for one device.

    Raises:
      ValueError: a mesh with Explicit axes or, of several processes, none or one that leaves out
        some of them.
    """
    mesh = mesh_of(tree) if mesh is None else mesh
    check_whole(mesh)
    if mesh is not None:
        check_mesh(mesh)
    return mesh


def batch_on(mesh: Mesh | None, batch: PyTree) -> PyTree:
    """A batch by rows, of all processes; arrays that lie on the mesh already stay as they lie.

    Instead of the arrays it may be those rows that this process needs, as a `data.endless.Part`.
    """
    if mesh is None:
        return batch

    def place(x: Any) -> jax.Array:
        there = placed_on(x)
        stays = there is not None and (jax.process_count() == 1 or there == mesh)
        return x if stays else put(x, row_shardings(x, mesh))

    def join(x: Any) -> jax.Array:
        whole = jax.ShapeDtypeStruct((batch.count, *x.shape[1:]), x.dtype)
        return jax.make_array_from_process_local_data(row_shardings(whole, mesh), x, whole.shape)

    return (
        jax.tree.map(join, dict(batch.rows))
        if hasattr(batch, "rows")
        else jax.tree.map(place, batch)
    )


def rows_here(mesh: Mesh, count: int) -> tuple[int, int]:
    """Rows of a batch of `count` that this process holds: the first, and one past the last."""
    where = row_shardings(jax.ShapeDtypeStruct((count,), bool), mesh)
    rows = [
        index[0].indices(count)
        for index in where.addressable_devices_indices_map((count,)).values()
    ]
    return min(first for first, _, _ in rows), max(last for _, last, _ in rows)
