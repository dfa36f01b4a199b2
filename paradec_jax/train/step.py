"""One update: gradient, accumulation over micro-batches, optimizer, moving average."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paradec_jax.objective import Metrics, Objective, Sum, Sums
from paradec_jax.sharding.rules import by_rows
from paradec_jax.train.state import TrainState, update_ema

PyTree = Any
Loss = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, Metrics]]
Step = Callable[[TrainState, PyTree, PyTree], tuple[TrainState, Metrics]]


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    ema_decay: float | None = None,
    ema_warmup: bool = True,
    accumulate: int = 1,
) -> Step:
    """Builds the jitted update `step(state, frozen, batch) -> (state, metrics)`, which donates `state`.

    With step number t and micro-batch i of `accumulate`, the gradient is that of the whole batch's loss,

        g = grad value(sum_i sums(params, frozen, batch_i | {"step": t}, fold_in(fold_in(key, t), i)))

    summed in float32, whatever number of tokens counts in each micro-batch. Where the state has a teacher,
    `frozen` is {"teacher": ..., "round": ...} of the state. An update whose loss or gradient norm is not finite is
    not applied: the state comes back as it went in, its step number included, with `finite` false in the metrics.

    Args:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`; differentiated in `params` only. `batch` is a
        dict and gains `batch["step"]`, the int32 step number, for curricula that must not recompile. To be
        accumulated it must be an `Objective`, as those of `losses` are.
      optimizer: an optax chain; clipping belongs to it.
      ema_decay: decay of the moving average (`update_ema`), needed iff the state has one.
      ema_warmup: whether that decay is warmed up.
      accumulate: micro-batches an update; every array of the batch is split along its leading axis, and scalars
        are those of all micro-batches.

    Returns:
      The step. Its metrics are the loss's own, of the whole batch, and `loss`, `grad_norm` (before clipping) and
      `finite` (bool), all scalars that stay on the device.

    Raises:
      ValueError: if `accumulate` or `ema_decay` is out of range, if a loss that is no `Objective` is to be
        accumulated or, while tracing, if the batch does not
        divide, a metric is not a scalar, only one of `ema_decay` and `state.ema` is given, or both `frozen` and a
        teacher of the state are.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, not {accumulate}")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay must be in [0, 1), not {ema_decay}")
    graded = _graded(loss, accumulate)

    def step(state: TrainState, frozen: PyTree, batch: PyTree) -> tuple[TrainState, Metrics]:
        if (ema_decay is None) != (state.ema is None):
            has = "no ema" if state.ema is None else "an ema"
            raise ValueError(f"ema_decay is {ema_decay} but the state has {has}")
        if state.teacher is not None:
            if frozen is not None:
                raise ValueError("the state has a teacher, which takes the place of frozen: give one of them")
            frozen = {"teacher": state.teacher, "round": state.round}
        key = jax.random.fold_in(state.key, state.step)

        (value, metrics), grads = graded(state.params, frozen, batch | {"step": state.step}, key)
        metrics = metrics | {"loss": value}
        for name, metric in metrics.items():
            if jnp.ndim(metric):
                raise ValueError(f"metric {name!r} must be a scalar, not of shape {metric.shape}")
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        if ema_decay is not None:
            count = jnp.asarray(state.ema_count)
            ema = update_ema(state.ema, params, count, ema_decay, warmup=ema_warmup)
            new = dataclasses.replace(new, ema=ema, ema_count=count + 1)
        state = jax.tree.map(lambda n, o: n if n is o else jnp.where(finite, n, o), new, state)
        return state, metrics | {"grad_norm": norm, "finite": finite}

    return jax.jit(step, donate_argnums=0)


def _graded(loss: Loss, accumulate: int) -> Callable[..., tuple[tuple[jax.Array, Metrics], PyTree]]:
    """Value, metrics and gradient of a loss over the micro-batches of a batch."""
    if accumulate == 1:

        def whole(params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array) -> Any:
            return jax.value_and_grad(loss, has_aux=True)(params, frozen, batch, jax.random.fold_in(key, 0))

        return whole
    if not isinstance(loss, Objective):
        raise ValueError(
            f"accumulate={accumulate} needs a loss that says its sums and weights, an Objective of "
            "paradec_jax.objective: a mean over micro-batches is not the mean over the batch"
        )

    def in_parts(params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array) -> Any:
        def sums(params: PyTree, i: jax.Array, rows: PyTree) -> Sums:
            return loss.sums(params, frozen, rows, jax.random.fold_in(key, i))

        return _accumulated(loss, sums, params, _split(batch, accumulate), accumulate)

    return in_parts


def _accumulated(
    loss: Objective, sums: Callable[[PyTree, jax.Array, PyTree], Sums], params: PyTree, parts: PyTree, n: int
) -> tuple[tuple[jax.Array, Metrics], PyTree]:
    """Value and gradient of a loss over the leading axis of `parts`, one micro-batch at a time."""
    micro_batches = jnp.arange(n), parts
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
