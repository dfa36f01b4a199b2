"""Committing tokens: stop tokens and budgets are honoured here, once, for every decoder."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from paradec_jax.decode.protocol import Decoded, Progress, Reason, Request


def start(
    request: Request, size: int, scratch: int, initial: Float[Array, "B S D"], log_probs: bool
) -> Progress:
    """Progress of fresh rows: buffers of `size + scratch` positions that hold the prompts.

    Args:
      request: the request; a row's budget is cut where prompt and budget exceed `size`.
      size: positions a row may fill.
      scratch: room behind them for a window.
      initial: initial latent state of each of the `size + scratch` positions.
      log_probs: whether to keep log-probabilities.
    """
    batch, prompt = request.tokens.shape
    if prompt > size:
        raise ValueError(f"the prompt buffer has {prompt} positions, more than the decoder's size {size}")
    tokens = jnp.zeros((batch, size + scratch), jnp.int32)
    zeros = jnp.zeros(batch, jnp.int32)
    return Progress(
        tokens=lax.dynamic_update_slice(tokens, request.tokens, (0, 0)),
        prompt_lengths=request.lengths + 0,
        length=request.lengths + 0,
        limit=jnp.minimum(request.lengths + request.budgets, size),
        reason=zeros + jnp.where(request.lengths >= size, int(Reason.BUDGET), int(Reason.RUNNING)),
        keys=request.keys,
        stop=request.stop,
        initial=initial,
        log_probs=jnp.zeros(tokens.shape, jnp.float32) if log_probs else None,
        network_calls=zeros,
        positions=zeros,
        recurrences=zeros,
        recorded=request.recorded,
    )


def is_stop(tokens: Int[Array, "B W"], stop: Int[Array, "B K"]) -> Bool[Array, "B W"]:
    """Which tokens end their row."""
    return jnp.any(tokens[:, :, None] == stop[:, None, :], axis=-1)


def allowed(progress: Progress, tokens: Int[Array, "B W"], count: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the first `count` tokens may be committed: up to the budget and the first stop token."""
    width = tokens.shape[1]
    count = jnp.minimum(count, progress.limit - progress.length)
    hits = is_stop(tokens, progress.stop)
    until_stop = jnp.where(jnp.any(hits, axis=1), jnp.argmax(hits, axis=1) + 1, width)
    return jnp.where(progress.done, 0, jnp.clip(count, 0, until_stop)).astype(jnp.int32)


def commit(
    progress: Progress,
    tokens: Int[Array, "B W"],
    count: Int[Array, "B"],
    log_probs: Float[Array, "B W"] | None = None,
) -> Progress:
    """Appends the first `allowed` of `count` tokens to each running row and says why rows stop."""
    count = allowed(progress, tokens, count)
    written = _write(progress.tokens, tokens, progress.length, count)
    length = progress.length + count
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)
    stopped = is_stop(last, progress.stop)[:, 0] & (count > 0)
    reason = jnp.where(
        stopped, Reason.STOP, jnp.where(length >= progress.limit, Reason.BUDGET, Reason.RUNNING)
    )
    kept = progress.log_probs
    if kept is not None and log_probs is not None:
        kept = _write(kept, log_probs, progress.length, count)
    return dataclasses.replace(
        progress,
        tokens=written,
        length=length,
        reason=jnp.where(progress.done, progress.reason, reason),
        log_probs=kept,
    )


def extend(progress: Progress, tokens: Int[Array, "B W"], count: Int[Array, "B"]) -> Progress:
    """Appends `count` tokens to each running row and cuts nothing, for programs that run over their budget."""
    count = jnp.where(progress.done, 0, count)
    return dataclasses.replace(
        progress,
        tokens=_write(progress.tokens, tokens, progress.length, count),
        length=progress.length + count,
    )


def _write(buffer: Array, new: Array, at: Array, count: Array) -> Array:
    width = new.shape[1]

    def of_row(row: Array, new: Array, at: Array, count: Array) -> Array:
        old = lax.dynamic_slice(row, (at,), (width,))
        return lax.dynamic_update_slice(row, jnp.where(jnp.arange(width) < count, new, old), (at,))

    return jax.vmap(of_row)(buffer, new, at, count)


def window(rows: Shaped[Array, "B S *rest"], at: Int[Array, "B"], width: int) -> Shaped[Array, "B W *rest"]:
    """Positions `at .. at + width - 1` of each row."""
    return jax.vmap(lambda row, p: lax.dynamic_slice_in_dim(row, p, width))(rows, at)


def shift(x: Shaped[Array, "B _ *rest"], by: Int[Array, "B"], width: int = 0) -> Shaped[Array, "B W *rest"]:
    """Slots `by .. by + width - 1` of each row (by default as many as there are), zeros beyond the last."""
    slots = x.shape[1]
    room = jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    return window(room, jnp.minimum(by, slots), width or slots)


def stop_rows(progress: Progress, rows: Bool[Array, "B"]) -> Progress:
    """Stops running rows at the caller's word, for instance because a stop string has appeared."""
    reason = jnp.where(rows & ~progress.done, Reason.CALLER, progress.reason)
    return dataclasses.replace(progress, reason=reason)


def finish(progress: Progress, size: int, pad: int) -> Decoded:
    """The rows as a result: `pad` behind each row's length, scratch cut off."""
    within = jnp.arange(size) < progress.length[:, None]
    log_probs = progress.log_probs
    return Decoded(
        tokens=jnp.where(within, progress.tokens[:, :size], pad),
        prompt_lengths=progress.prompt_lengths,
        lengths=progress.length,
        reasons=progress.reason,
        log_probs=None if log_probs is None else jnp.where(within, log_probs[:, :size], 0.0),
        network_calls=progress.network_calls,
        positions=progress.positions,
        recurrences=progress.recurrences,
    )
