"""Where a decoder's state lies on a mesh: rows over `data` and `fsdp`, keys and values by heads as
well.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paradec_jax.decode.machine.request import Request
from paradec_jax.nn.cache import KV, on_mesh
from paradec_jax.sharding.mesh import row_shardings
from paradec_jax.sharding.processes import put, shared
from paradec_jax.sharding.rules import by_rows, sizes_in_force, whole


def over_processes(
    mesh: Mesh | None, params: Any, request: Request, knobs: Any
) -> tuple[Request, Any]:
    """The request by rows and the knobs on every device, where a mesh has devices of several
    processes.

    What each process has of them on its host must be the same. Other meshes, and none, take them as
    they are.

    Raises:
      ValueError: parameters that lie on devices of one process.
    """
    if mesh is None or not mesh.is_multi_process:
        return request, knobs
    if not all(shared(leaf) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "the request lies on a mesh of several processes and the parameters do not: put them there "
            "(paradec_jax.sharding.processes.put with paradec_jax.shardings, or generate(mesh=))"
        )

    everywhere = jax.tree.map(lambda leaf: NamedSharding(mesh, P()), knobs)
    return put(request, row_shardings(request, mesh)), put(knobs, everywhere)


def placed(tree: Any, batch: int | None = None) -> Any:
    """Constrains a request or a state: keys and values by rows and heads, what has a leading axis
    of rows by rows.

    Everything else lies whole on every device, so that a state has one place before and after every
    call. Does nothing where the program is traced for no mesh. `batch` is B, that of a state's
    `rows` when None.
    """
    if not sizes_in_force():
        return tree
    count = tree.rows.length.shape[0] if batch is None else batch

    def place(leaf: Any) -> Any:
        if isinstance(leaf, KV):
            return on_mesh(leaf)
        if not jnp.ndim(leaf):
            return leaf
        return by_rows(leaf) if leaf.shape[0] == count else whole(leaf)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, KV))
