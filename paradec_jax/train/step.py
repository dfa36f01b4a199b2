"""The state of a run and its update: gradient, micro-batches, optimizer, moving average, rounds of
a teacher.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paradec_jax.objective import Metrics, Objective, Sum, Sums
from paradec_jax.records import pytree, record
from paradec_jax.sharding.batches import mesh_for
from paradec_jax.sharding.layout import shardings, shardings_like
from paradec_jax.sharding.mesh import on
from paradec_jax.sharding.processes import put, shared
from paradec_jax.sharding.rules import by_rows
from paradec_jax.train.identity import checksums
from paradec_jax.train.processes import check_same

PyTree = Any
Loss = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, Metrics]]
Step = Callable[["TrainState", PyTree], tuple["TrainState", Metrics]]


@pytree
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
        """The state before the first step. Its arrays are copies, since the train step donates its
        state.

        On a mesh one program makes all of it where it lies: no device holds more than its part.

        Args:
          params, teacher: initial parameters, and those of a teacher.
          optimizer, key: an optax chain, such as `adamw`, and the typed PRNG key of the run.
          ema: whether there is a moving average.
          mesh: mesh of `make_mesh`; the one that the parameters lie on, or none, when None.
        """
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
            raise TypeError(
                "key must be one typed PRNG key, as jax.random.key(seed) makes, "
                f"not {key.dtype}{list(key.shape)}"
            )

        def make(params: PyTree, teacher: PyTree, key: jax.Array) -> "TrainState":
            params, teacher = jax.tree.map(jnp.array, (params, teacher))
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


def state_shardings(state: TrainState, mesh: Any) -> TrainState:
    """A sharding for each array of a state, or of its shapes: moments and averages lie as their
    parameters.
    """
    return shardings_like(state, state.params, shardings(state.params, mesh), mesh)


def spread(tree: PyTree, where: PyTree) -> PyTree:
    """Puts arrays where they are to lie. Raises ValueError where processes have different ones."""
    if jax.process_count() > 1:
        leaves = [x for x in jax.tree.leaves(tree) if not shared(x) or x.is_fully_replicated]
        copies = [x.addressable_data(0) if shared(x) else x for x in leaves]
        check_same({"parameters": checksums(copies)})
    return put(tree, where)


def update_ema(ema: PyTree, params: PyTree, count: jax.Array | int, decay: float) -> PyTree:
    """One update of the moving average, its decay warmed up so that the initial values are soon
    forgotten.

        d_n = min(decay, (1 + n) / (10 + n)),    ema <- d_n ema + (1 - d_n) params

    so that the first update, n = 1, keeps 2/11 of the initial values, and a decay of 0.9999 is
    reached after 90,000
    updates: in shorter runs the warm-up alone rules. Here n - 1 is `count`, the updates of the
      average so far.
    """
    n = jnp.asarray(count) + 1
    d = jnp.minimum(jnp.float32(decay), (1 + n) / (10 + n)).astype(jnp.float32)
    return jax.tree.map(lambda e, p: d * e + (1 - d) * p.astype(e.dtype), ema, params)


def averaged(state: TrainState) -> PyTree:
    """The average of a state in the types of its parameters; the parameters where it has none."""
    if state.ema is None:
        return state.params
    return jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, state.params)


def float32_copy(x: jax.Array) -> jax.Array:
    """A copy, floating point numbers in float32."""
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.array(x, dtype)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How a run with a teacher is cut into rounds: in each the student of the round before is the
    teacher.

    Attributes:
      updates: updates of each round.
      weights: which weights become the teacher: "raw" or "ema", from which then the student too
        goes on.
      reset_optimizer: whether a round begins with a new optimizer: moments, and the count of its
        schedule.
      reset_ema: whether a round begins a new average, from the student's weights and with a count
        of 0.
    """

    updates: int
    weights: str = "raw"
    reset_optimizer: bool = False
    reset_ema: bool = False

    def __post_init__(self) -> None:
        if self.updates < 1 or self.weights not in ("raw", "ema"):
            raise ValueError(f"updates must be above 0 and weights raw or ema, not {self}")

    def begin(self, state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
        """The state before the first update of the next round."""
        if state.ema is None and (self.weights == "ema" or self.reset_ema):
            raise ValueError(
                "these rounds need a moving average, and the state has none: give ema_decay"
            )
        params = averaged(state) if self.weights == "ema" else state.params
        new = {"params": params, "teacher": params, "round": state.step // self.updates}
        if self.reset_optimizer:
            new["opt_state"] = optimizer.init(params)
        if self.reset_ema:
            new |= {
                "ema": jax.tree.map(float32_copy, params),
                "ema_count": jnp.zeros((), jnp.int32),
            }
        return dataclasses.replace(state, **new)


@record
class TrainStep:
    """The jitted update `step(state, batch) -> (state, metrics)`, which donates `state`.

    With step number t and micro-batch i of `accumulate`, the gradient is that of the whole batch's
    loss,

        g = grad value(sum_i sums(params, frozen, batch_i | {"step": t}, fold_in(fold_in(key, t),
        i)))

    summed in float32, whatever number of tokens counts in each micro-batch. An update whose loss or
    gradient norm is not finite is not applied: the state comes back as it went in, its step number
    included. The metrics are those of the loss, `loss`, `grad_norm` (before clipping) and `finite`:
    scalars of the whole batch that stay on the device.

    Attributes:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`, differentiated in `params`. `batch`
        is a dict and gains `batch["step"]`, the int32 step number, for curricula that must not
        recompile. To be accumulated it must be an `Objective`, as those of `losses` are.
      optimizer: an optax chain; clipping belongs to it.
      frozen: second argument of the loss, such as a backbone: not trained, not saved, not donated.
        Where the state has a teacher it is {"teacher": ..., "round": ...} of the state.
      rounds: how often the student becomes the teacher; one round for ever when None.
      ema_decay: decay of the moving average (`update_ema`), needed iff the state has one.
      accumulate: micro-batches an update, into which every array of the batch is split along its
        leading axis.
    """

    loss: Loss
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    frozen: PyTree = None
    rounds: Rounds | None = None
    ema_decay: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {self.accumulate}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), not {self.ema_decay}")
        if self.accumulate > 1 and not isinstance(self.loss, Objective):
            needs = "a loss that says its sums and weights, an Objective of paradec_jax.objective"
            raise ValueError(
                f"accumulate={self.accumulate} needs {needs}, since means do not add up"
            )

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        return self.jitted(state, self.frozen, batch)

    @functools.cached_property
    def jitted(self) -> Any:
        """`update` as one program that donates its state."""
        return jax.jit(self.update, donate_argnums=0)

    def on(self, mesh: Mesh, state: TrainState) -> Step:
        """The step on a mesh: states come back where this one lies, so that it compiles once and no
        array moves.
        """
        where = state_shardings(state, mesh), NamedSharding(mesh, P())
        program = jax.jit(self.update, out_shardings=where, donate_argnums=0)
        frozen = None if self.frozen is None else spread(self.frozen, shardings(self.frozen, mesh))

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            with on(mesh):
                return program(state, frozen, batch)

        return step

    def update(
        self, state: TrainState, frozen: PyTree, batch: PyTree
    ) -> tuple[TrainState, Metrics]:
        """The pure function."""
        if (self.ema_decay is None) != (state.ema is None):
            has = "no" if state.ema is None else "an"
            raise ValueError(f"ema_decay is {self.ema_decay} but the state has {has} ema")
        if self.frozen is not None and state.teacher is not None:
            raise ValueError(
                "the state has a teacher, which takes the place of frozen: give one of them"
            )
        if self.rounds is not None:
            if state.teacher is None:
                raise ValueError("rounds need a teacher to begin with, and the state has none")
            due = state.step // self.rounds.updates > jnp.asarray(state.round)
            begin = functools.partial(self.rounds.begin, optimizer=self.optimizer)
            state = jax.lax.cond(due, begin, lambda state: state, state)
        if state.teacher is not None:
            frozen = {"teacher": state.teacher, "round": state.round}

        key = jax.random.fold_in(state.key, state.step)
        batch = batch | {"step": state.step}
        if self.accumulate == 1:
            graded = jax.value_and_grad(self.loss, has_aux=True)
            (value, metrics), grads = graded(
                state.params, frozen, batch, jax.random.fold_in(key, 0)
            )
        else:
            (value, metrics), grads = in_parts(
                self.loss, state.params, frozen, batch, key, self.accumulate
            )
        metrics = metrics | {"loss": value}
        for name, metric in metrics.items():
            if jnp.ndim(metric):
                raise ValueError(f"metric {name!r} must be a scalar, not of shape {metric.shape}")

        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        if self.ema_decay is not None:
            count = jnp.asarray(state.ema_count)
            ema = update_ema(state.ema, params, count, self.ema_decay)
            new = dataclasses.replace(new, ema=ema, ema_count=count + 1)

        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        state = jax.tree.map(lambda n, o: n if n is o else jnp.where(finite, n, o), new, state)
        return state, metrics | {"grad_norm": norm, "finite": finite}


make_train_step = TrainStep


def in_parts(
    loss: Any, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array, n: int
) -> Any:
    """Value, metrics and gradient of a loss, one of n micro-batches at a time."""

    def sums(params: PyTree, i: jax.Array, rows: PyTree) -> Sums:
        return loss.sums(params, frozen, rows, jax.random.fold_in(key, i))

    micro_batches = jnp.arange(n), _split(batch, n)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    none = jax.tree.map(jnp.zeros_like, jax.eval_shape(sums, params, *first))

    # The loss is linear in its totals, so its slope is that at zero, with the weights of the whole
    # batch. They do not depend on parameters, and XLA leaves the network out of this first pass.
    def weigh(weights: PyTree, inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
        parts = sums(params, *inputs)
        return {name: weight + parts[name].weight for name, weight in weights.items()}, None

    weights, _ = jax.lax.scan(
        weigh, {name: part.weight for name, part in none.items()}, micro_batches
    )

    def value(totals: PyTree) -> jax.Array:
        return loss.value({name: Sum(total, weights[name]) for name, total in totals.items()})[0]

    slope = jax.grad(value)({name: part.total for name, part in none.items()})

    def body(carry: tuple[Sums, PyTree], inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
        def sloped(params: PyTree) -> tuple[jax.Array, Sums]:
            parts = sums(params, *inputs)
            return optax.tree.vdot(slope, {name: part.total for name, part in parts.items()}), parts

        grads, parts = jax.grad(sloped, has_aux=True)(params)
        so_far, total = carry
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
        return (jax.tree.map(jnp.add, so_far, parts), total), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (whole, total), _ = jax.lax.scan(body, (none, zeros), micro_batches)
    return loss.value(whole), jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)


def _split(batch: PyTree, n: int) -> PyTree:
    """Reshapes every array from [rows, ...] to [n, rows / n, ...], and repeats scalars n times."""

    def split(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if not jnp.ndim(x):
            return jnp.broadcast_to(x, (n,))
        if x.shape[0] % n:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            rows = f"batch[{name!r}] has shape {x.shape}"
            raise ValueError(f"{rows}; its first axis must be a multiple of accumulate={n}")
        return by_rows(x.reshape(n, x.shape[0] // n, *x.shape[1:]), axis=1)

    return jax.tree_util.tree_map_with_path(split, batch)
