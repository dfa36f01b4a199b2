"""The rows of a batch: their tokens, how far each is committed, why it stopped, what it cost.

Stop tokens and budgets are honoured here, once, for every decoder.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Counts
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import number_of, put, select, window
from paradec_jax.records import pytree, static

NETWORK_CALLS, POSITIONS = "network_calls", "positions"


class Reason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP = 1
    BUDGET = 2
    CALLER = 3


@pytree
class Rows:
    """What every driver, stop string, queue and table reads. Invariant: `tokens[:length]` never
    change again.

    Attributes:
      tokens: committed tokens (or those of a canvas), then scratch, [B, S].
      prompt_lengths: given tokens that a row begins with, [B].
      length: committed tokens, the prompt included, [B].
      limit: length at which the budget is used, [B].
      reason: a `Reason`, [B].
      keys, stop: keys and stop tokens of the request.
      counts: what the row has cost while it was running, [B] each: "network_calls" (prompt
        included), "positions" that those calls computed for it, and what the decoder's networks
        declare.
      fixed: positions whose token was given, which are never generated and never a stop, [B, S];
        None where that is the prompt alone.
      log_probs: log-probability of each committed token, [B, S], or None where not asked for.
      recorded: recorded draws of the request.
      size: positions that may be committed; the rest of the buffer is room for a window.
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]
    reason: Int[Array, "B"]
    keys: Array
    stop: Int[Array, "B K"]
    counts: dict[str, Int[Array, "B"]]
    fixed: Bool[Array, "B S"] | None
    log_probs: Float[Array, "B S"] | None
    recorded: Any
    size: int = static()

    @property
    def done(self) -> Bool[Array, "B"]:
        """Rows that have stopped."""
        return self.reason != Reason.RUNNING

    @property
    def newest(self) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
        """The last committed token of each row, and its position."""
        at = self.length - 1
        return window(self.tokens, at, 1), at[:, None]

    def spend(self, counts: Counts, positions: Array | int, calls: Array | int = 1) -> "Rows":
        """Adds calls, the real positions that they computed, and `Forward.counts`, to counts of
        rows that run.
        """
        running = ~self.done
        spent = {NETWORK_CALLS: calls, POSITIONS: positions, **counts}
        added = {name: self.counts[name] + running * amount for name, amount in spent.items()}
        return dataclasses.replace(self, counts=self.counts | added)

    def allowed(self, tokens: Int[Array, "B W"], count: Int[Array, "B"]) -> Int[Array, "B"]:
        """How many of the first `count` tokens may be committed: up to the budget and the first
        stop token.
        """
        count = jnp.minimum(count, self.limit - self.length)
        hits = is_stop(tokens, self.stop)
        until_stop = jnp.where(jnp.any(hits, axis=1), jnp.argmax(hits, axis=1) + 1, tokens.shape[1])
        return jnp.where(self.done, 0, jnp.clip(count, 0, until_stop)).astype(jnp.int32)

    def commit(
        self,
        tokens: Int[Array, "B W"],
        count: Int[Array, "B"],
        log_probs: Float[Array, "B W"] | None = None,
    ) -> "Rows":
        """Appends the first `allowed` of `count` tokens to each running row and says why rows stop."""
        count = self.allowed(tokens, count)
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)
        stopped = is_stop(last, self.stop)[:, 0] & (count > 0)
        where = jnp.arange(tokens.shape[1]) < count[:, None]
        rows = self.write(tokens, where, self.length, log_probs)
        return rows._moved(self.length + count, stopped)

    def write(
        self,
        tokens: Int[Array, "B W"],
        where: Bool[Array, "B W"],
        at: Int[Array, "B"],
        log_probs: Float[Array, "B W"] | None = None,
    ) -> "Rows":
        """Puts tokens at positions `at + i` of running rows, in any order; given tokens and
        `length` stay.
        """
        where = where & ~self.done[:, None]
        if self.fixed is not None:
            where = where & ~window(self.fixed, at, tokens.shape[1])
        likely = self.log_probs
        if likely is not None and log_probs is not None:
            likely = put(likely, log_probs, at, where)
        tokens = put(self.tokens, tokens, at, where)
        return dataclasses.replace(self, tokens=tokens, log_probs=likely)

    def settle(self, final: Bool[Array, "B S"]) -> "Rows":
        """Commits the leading run of final positions; budget and stop tokens cut it as `commit`
        does.
        """
        position = jnp.arange(final.shape[1])
        run = jnp.clip(select.leading_run(final), self.length, jnp.maximum(self.limit, self.length))
        fresh = (position >= self.length[:, None]) & (position < run[:, None])
        if self.fixed is not None:
            fresh &= ~self.fixed
        hits = is_stop(self.tokens, self.stop) & fresh
        stopped = jnp.any(hits, axis=1)
        length = jnp.where(stopped, jnp.argmax(hits, axis=1) + 1, run).astype(jnp.int32)
        return self._moved(jnp.where(self.done, self.length, length), stopped)

    def interrupt(self, rows: Bool[Array, "B"]) -> "Rows":
        """Stops running rows at the caller's word, for instance because a stop string has appeared."""
        reason = jnp.where(rows & ~self.done, Reason.CALLER, self.reason)
        return dataclasses.replace(self, reason=reason.astype(self.reason.dtype))

    def completions(self) -> list[list[int]]:
        """The tokens generated so far, as lists, on the host."""
        return [row.tolist() for row in own_entries(self, self.tokens, self.length)]

    def finish(self, pad: int) -> "Decoded":
        """The rows as a result: `pad` after each row's length, scratch cut off."""
        within = jnp.arange(self.size) < self.length[:, None]
        log_probs = self.log_probs
        return Decoded(
            tokens=jnp.where(within, self.tokens[:, : self.size], pad),
            prompt_lengths=self.prompt_lengths,
            lengths=self.length,
            reasons=self.reason,
            log_probs=None
            if log_probs is None
            else jnp.where(within, log_probs[:, : self.size], 0.0),
            counts=self.counts,
            fixed=None if self.fixed is None else self.fixed[:, : self.size],
        )

    def _moved(self, length: Array, stopped: Array) -> "Rows":
        over = jnp.where(length >= self.limit, Reason.BUDGET, Reason.RUNNING)
        reason = jnp.where(self.done, self.reason, jnp.where(stopped, Reason.STOP, over))
        return dataclasses.replace(self, length=length, reason=reason.astype(self.reason.dtype))


def begin(
    request: Request,
    size: int,
    scratch: int,
    counters: Iterable[str] = (),
    *,
    log_probs: bool = False,
    overrun: int = 0,
) -> Rows:
    """Fresh rows: buffers of `size + overrun + scratch` positions that hold what is given.

    Args:
      request: the request; a row's budget is cut where canvas and budget exceed `size`.
      size: positions that a row's budget may reach.
      scratch: room for a window after them.
      counters: counters that the decoder's networks declare.
      log_probs: whether to keep log-probabilities.
      overrun: positions that a row may hold beyond its budget, for programs that run over it.

    Raises:
      ValueError: a prompt buffer longer than `size`.
    """
    batch, prompt = request.tokens.shape
    room = size + overrun + scratch
    tokens = lax.dynamic_update_slice(jnp.zeros((batch, room), jnp.int32), request.tokens, (0, 0))
    zeros = jnp.zeros(batch, jnp.int32)
    lengths, fixed, start = request.lengths + 0, None, request.lengths + 0
    limit = lengths + jnp.minimum(request.budgets, size - lengths)  # no sum beyond int32
    if request.given is not None:
        fixed = jnp.pad(request.given, ((0, 0), (0, room - prompt)))
        fixed &= jnp.arange(room) < lengths[:, None]
        start = select.leading_run(fixed)
    return Rows(
        tokens=tokens,
        prompt_lengths=start,
        length=start + 0,
        limit=limit,
        reason=zeros + jnp.where(start >= limit, Reason.BUDGET, Reason.RUNNING),
        keys=request.keys,
        stop=request.stop,
        counts=dict.fromkeys((NETWORK_CALLS, POSITIONS, *counters), zeros + 0),
        fixed=fixed,
        log_probs=jnp.zeros(tokens.shape, jnp.float32) if log_probs else None,
        recorded=request.recorded,
        size=size + overrun,
    )


def is_stop(tokens: Int[Array, "B W"], stop: Int[Array, "B K"]) -> Bool[Array, "B W"]:
    """Which tokens end their row."""
    return jnp.any(tokens[:, :, None] == stop[:, None, :], axis=-1)


def own_entries(of: Any, x: Array, length: Array) -> list[np.ndarray]:
    """What of x [B, S] belongs to generated tokens of rows or a result, row by row, on the host."""
    position = np.arange(x.shape[1])
    given = position < np.asarray(of.prompt_lengths)[:, None]
    if of.fixed is not None:
        given = np.asarray(of.fixed)
    kept = ~given & (position < np.asarray(length)[:, None])
    return [row[own] for row, own in zip(np.asarray(x), kept, strict=True)]


@pytree
class Decoded:
    """The result of a decoder.

    Attributes:
      tokens: given and generated tokens, `pad` after them, [B, S].
      prompt_lengths: given tokens that the row begins with, [B].
      lengths: committed tokens, given ones included, [B].
      reasons: why each row stopped, a `Reason`, [B].
      log_probs: log-probability of each generated token, [B, S], or None.
      counts: what each row cost, [B] each; see `Rows`.
      fixed: positions whose token was given, [B, S]; None where that is the prompt alone.
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    lengths: Int[Array, "B"]
    reasons: Int[Array, "B"]
    log_probs: Float[Array, "B S"] | None
    counts: dict[str, Int[Array, "B"]]
    fixed: Bool[Array, "B S"] | None = None

    @property
    def network_calls(self) -> Int[Array, "B"]:
        """Calls of the network for the row, prefill included."""
        return self.counts[NETWORK_CALLS]

    @property
    def positions(self) -> Int[Array, "B"]:
        """Positions computed for the row."""
        return self.counts[POSITIONS]

    @property
    def generated(self) -> Int[Array, "B"]:
        """Tokens generated in each row."""
        if self.fixed is None:
            return self.lengths - self.prompt_lengths
        position = jnp.arange(self.fixed.shape[1])
        return number_of(~self.fixed & (position < self.lengths[:, None]))

    def completions(self) -> list[list[int]]:
        """The generated tokens of each row, as lists; given ones are left out."""
        return [row.tolist() for row in own_entries(self, self.tokens, self.lengths)]

    def generated_log_probs(self) -> list[np.ndarray]:
        """Log-probability of each generated token, in nats.

        Raises:
          ValueError: the decoder was not asked to keep them.
        """
        if self.log_probs is None:
            raise ValueError("no log-probabilities were kept: decode with log_probs=True")
        return own_entries(self, self.log_probs, self.lengths)
