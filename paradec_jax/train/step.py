"""One update: gradient, accumulation over micro-batches, optimizer, moving average, rounds of a teacher."""

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
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.mesh import on
from paradec_jax.sharding.rules import by_rows
from paradec_jax.train.state import TrainState, float32_copy, spread, state_shardings, update_ema

PyTree = Any
Loss = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, Metrics]]
Step = Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How a run with a teacher is cut into rounds: in each the student of the round before is the teacher.

    Attributes:
      updates: updates of each round.
      weights: which weights become the teacher: "raw" or "ema", from which then the student too goes on.
      reset_optimizer: whether a round begins with a new optimizer: moments, and the count of its schedule.
      reset_ema: whether a round begins a new average, from the student's weights and with a count of 0.
    """

    updates: int
    weights: str = "raw"
    reset_optimizer: bool = False
    reset_ema: bool = False

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates of a round must be at least 1, not {self.updates}")
        if self.weights not in ("raw", "ema"):
            raise ValueError(f"weights must be raw or ema, not {self.weights!r}")

    def begin(self, state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
        """The state before the first update of the next round."""
        params = state.params
        if self.weights == "ema":
            params = jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, params)
        new = {"params": params, "teacher": params, "round": state.step // self.updates}
        if self.reset_optimizer:
            new["opt_state"] = optimizer.init(params)
        if self.reset_ema:
            new |= {"ema": jax.tree.map(float32_copy, params), "ema_count": jnp.zeros((), jnp.int32)}
        return dataclasses.replace(state, **new)


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    frozen: PyTree = None,
    rounds: Rounds | None = None,
    ema_decay: float | None = None,
    accumulate: int = 1,
) -> "TrainStep":
    """Builds the jitted update `step(state, batch) -> (state, metrics)`, which donates `state`.

    With step number t and micro-batch i of `accumulate`, the gradient is that of the whole batch's loss,

        g = grad value(sum_i sums(params, frozen, batch_i | {"step": t}, fold_in(fold_in(key, t), i)))

    summed in float32, whatever number of tokens counts in each micro-batch. An update whose loss or gradient norm is
    not finite is not applied: the state comes back as it went in, its step number included.

    Args:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`, differentiated in `params`. `batch` is a dict and
        gains `batch["step"]`, the int32 step number, for curricula that must not recompile. To be accumulated it
        must be an `Objective`, as those of `losses` are.
      optimizer: an optax chain; clipping belongs to it.
      frozen: second argument of the loss, such as a backbone: not trained, not saved, not donated. Where the state
        has a teacher it is {"teacher": ..., "round": ...} of the state.
      rounds: how often the student becomes the teacher; one round for ever when None.
      ema_decay: decay of the moving average (`update_ema`), needed iff the state has one.
      accumulate: micro-batches an update; every array of the batch is split along its leading axis, and scalars
        are those of all micro-batches.

    Returns:
      The step. Its metrics are the loss's own, `loss`, `grad_norm` (before clipping) and `finite` (bool): scalars of
      the whole batch that stay on the device.

    Raises:
      ValueError: if `accumulate` or `ema_decay` is out of range or needs another loss or state or, while tracing, if
        the batch does not divide, a metric is not a scalar, or `rounds` and `frozen` do not suit the state.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, not {accumulate}")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay must be in [0, 1), not {ema_decay}")
    if accumulate > 1 and not isinstance(loss, Objective):
        raise ValueError(
            f"accumulate={accumulate} needs a loss that says its sums and weights, an Objective of "
            "paradec_jax.objective: a mean over micro-batches is not the mean over the batch"
        )
    return TrainStep(loss, optimizer, frozen, rounds, ema_decay, accumulate)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The update of `make_train_step`, which has its arguments as fields."""

    loss: Loss
    optimizer: optax.GradientTransformation
    frozen: PyTree
    rounds: Rounds | None
    ema_decay: float | None
    accumulate: int

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        return self.jitted(state, self.frozen, batch)

    @functools.cached_property
    def jitted(self) -> Any:
        """`update` as one program that donates its state."""
        return jax.jit(self.update, donate_argnums=0)

    def on(self, mesh: Mesh, state: TrainState) -> Step:
        """The step on a mesh: states come back where this one lies, so that it compiles once and no array moves."""
        where = state_shardings(state, mesh), NamedSharding(mesh, P())
        program = jax.jit(self.update, out_shardings=where, donate_argnums=0)
        frozen = None if self.frozen is None else spread(self.frozen, shardings(self.frozen, mesh))

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            with on(mesh):
                return program(state, frozen, batch)

        return step

    def update(self, state: TrainState, frozen: PyTree, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The pure function."""
        self._check(state)
        if self.rounds is not None:
            due = state.step // self.rounds.updates > state.round
            begin = functools.partial(self.rounds.begin, optimizer=self.optimizer)
            state = jax.lax.cond(due, begin, lambda state: state, state)
        if state.teacher is not None:
            frozen = {"teacher": state.teacher, "round": state.round}

        key = jax.random.fold_in(state.key, state.step)
        gradient = whole_batch if self.accumulate == 1 else functools.partial(in_parts, n=self.accumulate)
        inputs = state.params, frozen, batch | {"step": state.step}, key
        (value, metrics), grads = gradient(self.loss, *inputs)
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
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        state = jax.tree.map(lambda n, o: n if n is o else jnp.where(finite, n, o), new, state)
        return state, metrics | {"grad_norm": norm, "finite": finite}

    def _check(self, state: TrainState) -> None:
        if (self.ema_decay is None) != (state.ema is None):
            has = "no ema" if state.ema is None else "an ema"
            raise ValueError(f"ema_decay is {self.ema_decay} but the state has {has}")
        if state.teacher is not None and self.frozen is not None:
            raise ValueError("the state has a teacher, which takes the place of frozen: give one of them")
        if self.rounds is not None and state.teacher is None:
            raise ValueError("rounds need a teacher to begin with, and the state has none")
        uses_ema = self.rounds is not None and (self.rounds.weights == "ema" or self.rounds.reset_ema)
        if uses_ema and state.ema is None:
            raise ValueError("these rounds need a moving average, and the state has none: give ema_decay")


def whole_batch(loss: Loss, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array) -> Any:
    """Value, metrics and gradient of a loss."""
    return jax.value_and_grad(loss, has_aux=True)(params, frozen, batch, jax.random.fold_in(key, 0))


def in_parts(loss: Objective, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array, n: int) -> Any:
    """The same, one of n micro-batches at a time."""

    def sums(params: PyTree, i: jax.Array, rows: PyTree) -> Sums:
        return loss.sums(params, frozen, rows, jax.random.fold_in(key, i))

    micro_batches = jnp.arange(n), _split(batch, n)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, params, *first))

    # The loss is linear in its totals, so its slope is that at zero, with the weights of the whole batch. They do not
    # depend on parameters, and XLA leaves the network out of this first pass.
    def weigh(weights: PyTree, inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
        found = sums(params, *inputs)
        return {name: weight + found[name].weight for name, weight in weights.items()}, None

    weights, _ = jax.lax.scan(weigh, {name: part.weight for name, part in none.items()}, micro_batches)

    def value(totals: PyTree) -> jax.Array:
        return loss.value({name: Sum(total, weights[name]) for name, total in totals.items()})[0]

    slope = jax.grad(value)({name: part.total for name, part in none.items()})

    def body(carry: tuple[Sums, PyTree], inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
        def sloped(params: PyTree) -> tuple[jax.Array, Sums]:
            found = sums(params, *inputs)
            return optax.tree.vdot(slope, {name: part.total for name, part in found.items()}), found

        grads, found = jax.grad(sloped, has_aux=True)(params)
        so_far, total = carry
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
        return (jax.tree.map(jnp.add, so_far, found), total), None

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
            raise ValueError(
                f"batch[{name!r}] has shape {x.shape}; its first axis must be a multiple of accumulate={n}"
            )
        return by_rows(x.reshape(n, x.shape[0] // n, *x.shape[1:]), axis=1)

    return jax.tree_util.tree_map_with_path(split, batch)
