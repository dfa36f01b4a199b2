"""Where a decoder's state lies on a mesh: rows over `data` and `fsdp`, keys and values by heads as well."""

from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.nn.cache import KV, on_mesh
from paradec_jax.sharding.rules import by_rows, sizes_in_force, whole


def placed(tree: Any, batch: int | None = None) -> Any:
    """Constrains a request or a state: keys and values by rows and heads, what has a leading axis of rows by rows.

    Everything else lies whole on every device, so that a state has one place before and after every call. Does
    nothing where the program is traced for no mesh.

    Args:
      tree: a request, or a state with `rows`.
      batch: B; of the state's rows when None.
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
