"""One update: gradient, accumulation over micro-batches, optimizer, moving average."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paradec_jax.sharding.rules import by_rows
from paradec_jax.train.state import TrainState, update_ema

PyTree = Any
Metrics = dict[str, jax.Array]
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

    With step number t and micro-batch i of `accumulate`, the gradient is

        g = mean_i grad loss(params, frozen, batch_i | {"step": t}, fold_in(fold_in(key, t), i))

    summed in float32. Where the state has a teacher, `frozen` is {"teacher": ..., "round": ...} of the state. An
    update whose loss or gradient norm is not finite is not applied: the state comes back as it went in, its step
    number included, with `finite` false in the metrics.

    Args:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`; differentiated in `params` only. `batch` is a
        dict and gains `batch["step"]`, the int32 step number, for curricula that must not recompile.
      optimizer: an optax chain; clipping belongs to it.
      ema_decay: decay of the moving average (`update_ema`), needed iff the state has one.
      ema_warmup: whether that decay is warmed up.
      accumulate: micro-batches an update; every array of the batch is split along its leading axis. Equals
        the full batch for a loss that is a mean over rows (a mean over a varying number of tokens is not).

    Returns:
      The step. Its metrics are the loss's own, averaged over micro-batches, and `loss`, `grad_norm` (before
      clipping) and `finite` (bool), all scalars that stay on the device.

    Raises:
      ValueError: if `accumulate` or `ema_decay` is out of range or, while tracing, if the batch does not
        divide, a metric is not a scalar, only one of `ema_decay` and `state.ema` is given, or both `frozen` and a
        teacher of the state are.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, not {accumulate}")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay must be in [0, 1), not {ema_decay}")

    def step(state: TrainState, frozen: PyTree, batch: PyTree) -> tuple[TrainState, Metrics]:
        if (ema_decay is None) != (state.ema is None):
            has = "no ema" if state.ema is None else "an ema"
            raise ValueError(f"ema_decay is {ema_decay} but the state has {has}")
        if state.teacher is not None:
            if frozen is not None:
                raise ValueError("the state has a teacher, which takes the place of frozen: give one of them")
            frozen = {"teacher": state.teacher, "round": state.round}
        key = jax.random.fold_in(state.key, state.step)

        def gradient(i: int | jax.Array, rows: PyTree) -> tuple[Metrics, PyTree]:
            rows = rows | {"step": state.step}
            (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(
                state.params, frozen, rows, jax.random.fold_in(key, i)
            )
            metrics = metrics | {"loss": value}
            for name, metric in metrics.items():
                if jnp.ndim(metric):
                    raise ValueError(f"metric {name!r} must be a scalar, not of shape {metric.shape}")
            return metrics, grads

        if accumulate == 1:
            metrics, grads = gradient(0, batch)
        else:
            metrics, grads = _mean_gradient(gradient, state.params, _split(batch, accumulate), accumulate)

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


def _mean_gradient(
    gradient: Callable[[jax.Array, PyTree], tuple[Metrics, PyTree]], params: PyTree, batches: PyTree, n: int
) -> tuple[Metrics, PyTree]:
    """Mean of metrics and gradients over the leading axis of `batches`, one micro-batch at a time."""

    def body(total: PyTree, inputs: tuple[jax.Array, PyTree]) -> tuple[PyTree, Metrics]:
        metrics, grads = gradient(*inputs)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    total, metrics = jax.lax.scan(body, zeros, (jnp.arange(n), batches))
    grads = jax.tree.map(lambda t, p: (t / n).astype(p.dtype), total, params)
    return jax.tree.map(lambda m: jnp.mean(m, axis=0), metrics), grads


def _split(batch: PyTree, n: int) -> PyTree:
    """Reshapes every array from [rows, ...] to [n, rows / n, ...]."""

    def split(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if not x.ndim or x.shape[0] % n:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"batch[{name!r}] has shape {x.shape}; its first axis must be a multiple of accumulate={n}"
            )
        return by_rows(x.reshape(n, x.shape[0] // n, *x.shape[1:]), axis=1)

    return jax.tree_util.tree_map_with_path(split, batch)
