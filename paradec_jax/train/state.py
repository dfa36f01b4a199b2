"""Everything a training run needs to go on from where it stopped, except the position in the data."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from paradec_jax.sharding.layout import row_shardings, shardings, shardings_like
from paradec_jax.sharding.mesh import check_mesh, mesh_of, placed_on
from paradec_jax.sharding.processes import check_whole, put, shared
from paradec_jax.train.processes import check_same
from paradec_jax.train.recipe import checksums

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a training run, a pytree.

    Attributes:
      step: int32 scalar, updates applied so far.
      params: parameters, a nested dict.
      ema: moving average of `params` in float32, or None.
      opt_state: state of the optax optimizer.
      key: typed PRNG key of the run. It never changes: step t uses fold_in(key, t).
      ema_count: int32 scalar, updates of that average since it began, or None.
      teacher: parameters of a teacher, or None.
      round: int32 scalar, the round of a run with a teacher, counted from 0, or None.
    """

    step: jax.Array
    params: PyTree
    ema: PyTree | None
    opt_state: PyTree
    key: jax.Array
    ema_count: jax.Array | None = None
    teacher: PyTree | None = None
    round: jax.Array | None = None

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        *,
        ema: bool = False,
        teacher: PyTree | None = None,
        mesh: Mesh | None = None,
    ) -> "TrainState":
        """The state before the first step. Its arrays are copies, since the train step donates its state.

        On a mesh one program makes all of it where it lies: no device holds more than its part.

        Args:
          params, teacher: initial parameters, and those of a teacher.
          optimizer: an optax chain, such as `adamw`.
          key: typed PRNG key of the run.
          ema: whether there is a moving average.
          mesh: mesh of `make_mesh`; the one that the parameters lie on, or none, when None.

        Raises:
          TypeError: if `key` is not one typed PRNG key (`jax.random.key(seed)`).
          ValueError: from `mesh_for` and `spread`, or a parameter that no rule says anything of.
        """
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
            given = f"{key.dtype}{list(key.shape)}"
            raise TypeError(f"key must be one typed PRNG key, as jax.random.key(seed) makes, not {given}")

        def make(params: PyTree, teacher: PyTree, key: jax.Array) -> "TrainState":
            params, teacher = jax.tree.map(lambda x: jnp.array(x, copy=True), (params, teacher))
            count = jnp.zeros((), jnp.int32)
            return cls(
                step=count,
                params=params,
                ema=jax.tree.map(float32_copy, params) if ema else None,
                opt_state=optimizer.init(params),
                key=jax.random.clone(key),
                ema_count=count.copy() if ema else None,
                teacher=teacher,
                round=None if teacher is None else count.copy(),
            )

        mesh = mesh_for(mesh, (params, teacher))
        if mesh is None:
            return make(params, teacher, key)
        where = state_shardings(jax.eval_shape(make, params, teacher, key), mesh)
        given = spread((params, teacher, key), (where.params, where.teacher, where.key))
        return jax.jit(make, out_shardings=where)(*given)


def mesh_for(mesh: Mesh | None, tree: PyTree) -> Mesh | None:
    """The given mesh, or else the one that arrays of the tree lie on; None for one device.

    Raises:
      ValueError: a mesh with Explicit axes or, of several processes, none or one that leaves out some of them.
    """
    mesh = mesh_of(tree) if mesh is None else mesh
    check_whole(mesh)
    if mesh is not None:
        check_mesh(mesh)
    return mesh


def state_shardings(state: TrainState, mesh: Any) -> TrainState:
    """A sharding for each array of a state, or of its shapes: moments and averages lie as their parameters."""
    return shardings_like(state, state.params, shardings(state.params, mesh), mesh)


def spread(tree: PyTree, where: PyTree) -> PyTree:
    """Puts arrays where they are to lie. Raises ValueError where processes have different ones."""
    if jax.process_count() > 1:
        own = [x for x in jax.tree.leaves(tree) if not shared(x) or x.is_fully_replicated]
        copies = [x.addressable_data(0) if shared(x) else x for x in own]
        check_same({"parameters": checksums(copies)})
    return put(tree, where)


def batch_on(mesh: Mesh | None, batch: PyTree) -> PyTree:
    """A batch by rows, of all processes; arrays that lie on the mesh already stay as they lie.

    Args:
      mesh: mesh of the run; None leaves the batch as it is.
      batch: arrays, or those rows that this process needs, as a `data.endless.Part`.
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

    return jax.tree.map(join, dict(batch.rows)) if hasattr(batch, "rows") else jax.tree.map(place, batch)


def rows_here(mesh: Mesh, count: int) -> tuple[int, int]:
    """Which rows of a batch of `count` the devices of this process hold: the first, and one past the last."""
    where = row_shardings(jax.ShapeDtypeStruct((count,), bool), mesh)
    rows = [index[0].indices(count) for index in where.addressable_devices_indices_map((count,)).values()]
    return min(first for first, _, _ in rows), max(last for _, last, _ in rows)


def update_ema(ema: PyTree, params: PyTree, count: jax.Array | int, decay: float) -> PyTree:
    """One update of the moving average, its decay warmed up so that the initial values are soon forgotten.

        d_n = min(decay, (1 + n) / (10 + n)),    ema <- d_n ema + (1 - d_n) params

    so that the first update, n = 1, keeps 2/11 of the initial values, and a decay of 0.9999 is reached after 90,000
    updates: in shorter runs the warm-up alone rules.

    Args:
      ema: average after n - 1 updates, float32.
      params: parameters after the update.
      count: n - 1, updates of the average so far.
      decay: limit of d_n, in [0, 1).
    """
    n = jnp.asarray(count) + 1
    d = jnp.minimum(jnp.float32(decay), (1 + n) / (10 + n)).astype(jnp.float32)
    return jax.tree.map(lambda e, p: d * e + (1 - d) * p.astype(e.dtype), ema, params)


def float32_copy(x: jax.Array) -> jax.Array:
    """A copy, floating point numbers in float32."""
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.array(x, dtype, copy=True)
