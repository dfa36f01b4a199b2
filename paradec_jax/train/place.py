"""A run's arrays on a mesh: the state made where it lies, batches by rows, a step that moves nothing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paradec_jax.sharding.layout import layout, placed_shapes, row_shardings, shardings, shardings_like
from paradec_jax.sharding.mesh import check_mesh, mesh_of, on, placed_on
from paradec_jax.sharding.processes import check_whole, put
from paradec_jax.train.iterator import Part
from paradec_jax.train.state import TrainState
from paradec_jax.train.step import Step

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the arrays of a run lie: nowhere in particular, or on a mesh.

    Attributes:
      mesh: the mesh, or None.
      state: a sharding for each array of the state; None without a mesh.
    """

    mesh: Mesh | None = None
    state: Any = None

    @property
    def axes(self) -> dict[str, int] | None:
        """Sizes of the mesh's axes by their names; None without a mesh."""
        return None if self.mesh is None else {str(name): size for name, size in self.mesh.shape.items()}

    def peak(self, flops: float | None) -> float | None:
        """Operations a second of all devices, by those of one; None where nobody knows."""
        return flops if flops is None or self.mesh is None else flops * self.mesh.size

    def layout(self, state: TrainState) -> str:
        """The table of where the parameters lie, for people; empty without a mesh."""
        return "" if self.mesh is None else layout(state.params, self.mesh)

    def put(self, state: TrainState) -> TrainState:
        """The state where it belongs, after it was restored or a round began."""
        return state if self.mesh is None else put(state, self.state)

    def frozen(self, frozen: PyTree) -> PyTree:
        """Parameters that are not trained, by the same rules."""
        if self.mesh is None or frozen is None:
            return frozen
        return put(frozen, shardings(frozen, self.mesh))

    def batch(self, batch: PyTree | Part) -> PyTree:
        """A batch by rows, of all processes; arrays that lie on the mesh already stay as they lie."""
        mesh = self.mesh
        if mesh is None:
            return batch
        if isinstance(batch, Part):
            return {name: _whole(x, batch.first, batch.count, mesh) for name, x in batch.rows.items()}

        def place(x: Any) -> jax.Array:
            there = placed_on(x)
            stays = there is not None and (jax.process_count() == 1 or there == mesh)
            return x if stays else put(x, row_shardings(x, mesh))

        return jax.tree.map(place, batch)

    def share(self, count: int) -> tuple[int, int]:
        """Which rows of a batch of `count` the devices of this process hold: the first, and one past the last."""
        if self.mesh is None:
            return 0, count
        where = row_shardings(jax.ShapeDtypeStruct((count,), bool), self.mesh)
        rows = [index[0].indices(count) for index in where.addressable_devices_indices_map((count,)).values()]
        return min(first for first, _, _ in rows), max(last for _, last, _ in rows)

    def step(self, step: Step) -> Step:
        """The step, whose state comes back where it went in: it compiles once and no array moves."""
        mesh = self.mesh
        if mesh is None:
            return step
        pinned = self._pinned(step)

        def on_mesh(
            state: TrainState, frozen: PyTree, batch: PyTree
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            with on(mesh):
                return pinned(state, frozen, batch)

        return on_mesh

    def traced(self, step: Step, state: TrainState, frozen: PyTree, batch: PyTree) -> jax.stages.Traced:
        """The program behind `step`, traced for shapes: `lower().compile()` of it tells its price, and nothing runs.

        Args:
          step: of `make_train_step`.
          state: of `planned`.
          frozen, batch: shapes of the step's other arguments.

        Raises:
          ValueError: a place without a mesh.
        """
        mesh = self.mesh
        if mesh is None:
            raise ValueError("a program is planned for the devices of a mesh: give one to planned")
        where = self.state, shardings(frozen, mesh), row_shardings(batch, mesh)
        with on(mesh):
            return self._pinned(step).trace(*placed_shapes((state, frozen, batch), where))

    def _pinned(self, step: Step) -> Any:
        assert self.mesh is not None
        return jax.jit(
            lambda state, frozen, batch: step(state, frozen, batch),
            out_shardings=(self.state, NamedSharding(self.mesh, P())),
            donate_argnums=0,
        )


def planned(
    mesh: Mesh | None,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    ema: bool = False,
    teacher: PyTree | None = None,
) -> tuple[TrainState, Place]:
    """Shapes of the state before the first step (`TrainState.shape`), and where its arrays are to lie.

    Args:
      mesh: of `make_mesh`; None for that on which the parameters lie already, or for none.
      params, optimizer, key, ema, teacher: of `TrainState.create`.

    Raises:
      ValueError: a mesh with Explicit axes or, where there are several processes, none or one that leaves out some of
        them, or a parameter that no rule says anything of.
      TypeError: from `TrainState.create`.
    """
    found = mesh_of(params, teacher)
    mesh = found if mesh is None else mesh
    check_whole(mesh)
    if mesh is None:
        return TrainState.shape(params, optimizer, key, ema=ema, teacher=teacher), Place()
    check_mesh(mesh)
    abstract = jax.eval_shape(_maker(optimizer, ema), params, key=key, teacher=teacher)
    of_state = shardings_like(abstract, params, shardings(params, mesh), mesh)

    shape = placed_shapes(abstract, of_state)
    return dataclasses.replace(shape, key=key), Place(mesh, of_state)


def create_state(
    place: Place,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    ema: bool = False,
    teacher: PyTree | None = None,
) -> TrainState:
    """The state before the first step (`TrainState.create`), its arrays where they are to lie.

    On a mesh one program makes all of it where it lies: each device gets its part of the parameters, and its part of
    the optimizer's state, the average and the teacher is made there.

    Args:
      place: of `planned`.
      params, optimizer, key, ema, teacher: of `TrainState.create`.
    """
    if place.mesh is None:
        return TrainState.create(params, optimizer, key, ema=ema, teacher=teacher)
    where = place.state
    given = put(params, where.params), put(key, where.key)
    teacher = None if teacher is None else put(teacher, where.teacher)
    return jax.jit(_maker(optimizer, ema), out_shardings=where)(given[0], key=given[1], teacher=teacher)


def _whole(x: Any, first: int, count: int, mesh: Mesh) -> jax.Array:
    """The array of all rows, of which this process has those from `first` on."""
    shape = (count, *x.shape[1:])
    where = row_shardings(jax.ShapeDtypeStruct(shape, x.dtype), mesh)

    def own(index: Any) -> Any:
        start, stop, _ = index[0].indices(count)
        return x[start - first : stop - first]

    return jax.make_array_from_callback(shape, where, own)


def _maker(optimizer: optax.GradientTransformation, ema: bool) -> Callable[..., TrainState]:
    """(params, key=, teacher=) -> the state before the first step."""
    return functools.partial(TrainState.create, optimizer=optimizer, ema=ema)
