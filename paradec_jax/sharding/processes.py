"""Arrays of several processes: made of what each has on its host, and made whole again for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any


def shared(leaf: Any) -> bool:
    """Whether an array lies on devices of other processes too."""
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_fully_addressable
    )


def check_whole(mesh: Mesh | None) -> None:
    """Refuses a mesh that leaves out a process. Raises ValueError."""
    count = jax.process_count()
    if count == 1:
        return
    if mesh is None:
        raise ValueError(
            f"there are {count} processes and the parameters lie on devices of one: give mesh=make_mesh(...), which "
            "has the devices of all"
        )
    present = {device.process_index for device in mesh.devices.flat}
    if len(present) < count:
        raise ValueError(
            f"the mesh has devices of {len(present)} of {count} processes: make it of jax.devices(), which are all"
        )


def put(tree: PyTree, where: PyTree) -> PyTree:
    """As `jax.device_put(tree, where)`, but over processes nothing is sent: each gives what its
    devices hold.

    What a process has on its host or on its own devices must therefore be the same on all.
    """
    return jax.tree.map(_put, tree, where)


def _put(x: Any, where: Any) -> jax.Array:
    if shared(x):
        return x if x.sharding == where else _moved(where)(x)
    if where.is_fully_addressable:
        return jax.device_put(x, where)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _put(jax.random.key_data(x), where), impl=jax.random.key_impl(x)
        )
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def gathered(tree: PyTree) -> PyTree:
    """The tree with arrays of several processes whole on every device, where NumPy can read them."""
    leaves, structure = jax.tree.flatten(tree)
    apart = [i for i, leaf in enumerate(leaves) if shared(leaf) and not leaf.is_fully_replicated]
    if apart:
        whole = _moved(NamedSharding(leaves[apart[0]].sharding.mesh, P()))(
            [leaves[i] for i in apart]
        )
        for i, leaf in zip(apart, whole, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


@functools.lru_cache
def _moved(where: NamedSharding) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=where)
