"""Adaptive computation: each token gets as many recurrences as an exit criterion asks for (arXiv
2502.05171).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine import (
    COUNT,
    NOT_NEGATIVE,
    CachedState,
    DecoderBase,
    Forward,
    Number,
    Prefix,
    Request,
    Whole,
    knob,
)
from paradec_jax.decode.recurrent.criteria import CRITERIA
from paradec_jax.decode.recurrent.latents import Inputs, LatentKnobs, empty_state
from paradec_jax.decode.rules import last_of, where_rows, write_after_read
from paradec_jax.records import choices, pytree


@pytree
class AdaptiveKnobs(LatentKnobs):
    """Sampling, and when to look and leave.

    Attributes:
      exit_threshold: the criterion's threshold; its own default when None.
      min_recurrence: recurrences before the first check.
      check_every: recurrences between checks.
    """

    exit_threshold: Number | None = knob(
        None, unset=lambda decoder: CRITERIA[decoder.criterion].threshold
    )
    min_recurrence: Whole = knob(0, NOT_NEGATIVE)
    check_every: Whole = knob(1, COUNT)


@pytree
class AdaptiveInfo:
    """What the newest token took.

    Attributes:
      recurrences: recurrences done, [B].
      exit_values: what the criterion measured at each check, NaN where it was not asked, [B,
        steps].
    """

    recurrences: Int[Array, "B"]
    exit_values: Float[Array, "B steps"]


@choices
class Adaptive(DecoderBase):
    """Runs recurrences on the newest token until the criterion fires, then samples the next one.

    Attributes:
      criterion: a name of `criteria.CRITERIA`.
      max_recurrence: recurrences at most; the network's default when None.
      prefill_recurrence: recurrences of the prompt at most; `max_recurrence` when None.
      continuous: start each new position from the raw state of the one before it at its exit.
    """

    criterion: str = "latent-diff"
    max_recurrence: int | None = None
    prefill_recurrence: int | None = None
    continuous: bool = False
    Knobs = AdaptiveKnobs

    WORDS = {**DecoderBase.WORDS, "criterion": tuple(CRITERIA)}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: AdaptiveKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        state, fed = empty_state(self, request, 1, knobs), Inputs.prompt(request)
        depth = self.prefill_recurrence or self.max_recurrence
        loop, out = recur_until_exit(self, params, state, fed, knobs, depth)
        return commit_exit(self, params, state, fed, knobs, loop, out)[0]

    def step(
        self, params: Any, state: CachedState, knobs: AdaptiveKnobs
    ) -> tuple[CachedState, AdaptiveInfo]:
        """Runs recurrences on the newest token and commits the token it predicts."""
        fed = Inputs.newest(state)
        loop, out = recur_until_exit(self, params, state, fed, knobs, self.max_recurrence)
        return commit_exit(self, params, state, fed, knobs, loop, out)


@pytree
class ExitLoop:
    """Where the loop stands, and how it ended.

    Attributes:
      index: recurrences that the loop has done.
      states: s, [B, W, D]; those of a row stay once its criterion has fired.
      kv: keys and values of the window.
      active: rows whose criterion has not fired, [B].
      previous: what the criterion compares with at its next check.
      read: hidden state of the last real position [B, 1, D], and the coda's keys and values, as
        each row's last check read them; None where checks look at latents.
      checks: checks done by each row, [B].
      exit_values: what the criterion measured at each check, NaN where it was not asked, [B,
        steps].
    """

    index: Int[Array, ""]
    states: Float[Array, "B W D"]
    kv: Any
    active: Bool[Array, "B"]
    previous: Any
    read: Any
    checks: Int[Array, "B"]
    exit_values: Float[Array, "B steps"]


def recur_until_exit(
    decoder: Any,
    params: Any,
    state: CachedState,
    fed: Inputs,
    knobs: AdaptiveKnobs,
    depth: int | None,
    may_exit: bool = True,
) -> tuple[ExitLoop, Forward]:
    """Prelude, recurrences of each row until its criterion fires, `depth` of them at most, and
    coda.

    Args:
      decoder: decoder with a network and a `criterion`.
      state: rows, of which those that are running take part, and the cache that the window `fed`
        sees.
      depth: recurrences at most; the network's default when None.
      may_exit: whether the criterion is asked at all.

    Returns:
      The loop at its end, and what its states read out, the hidden state of the last real position
      alone.
    """
    network, criterion = decoder.network, CRITERIA[decoder.criterion]
    steps = network.at(depth).recurrence
    view = network.view(fed.positions, Prefix(state.cache, fed.visible))
    e, kv = network.embed(params, fed.tokens, view, network.empty_window(*fed.tokens.shape))
    valid = jnp.arange(fed.tokens.shape[1]) < fed.widths[:, None]

    def read_out(loop: ExitLoop) -> Forward:
        out = network.readout(params, loop.states, view, loop.kv)
        return dataclasses.replace(out, hidden=last_of(out.hidden, fed.widths))

    def check(loop: ExitLoop) -> ExitLoop:
        """Active rows measure, remember, and leave where the criterion fires."""
        seen, read = loop.states, loop.read
        if criterion.looks_at == "logits":
            out = read_out(loop)
            seen = network.logits(params, out.hidden)[:, 0]
            read = where_rows(loop.active, (out.hidden, out.kv.coda), read)
        value, previous = criterion.measure(loop.previous, seen, valid)
        column = jnp.arange(steps) == loop.checks[:, None]
        return dataclasses.replace(
            loop,
            active=loop.active & ~criterion.fires(value, knobs.exit_threshold),
            previous=where_rows(loop.active, previous, loop.previous),
            read=read,
            checks=loop.checks + loop.active,
            exit_values=jnp.where(column & loop.active[:, None], value[:, None], loop.exit_values),
        )

    def body(loop: ExitLoop) -> ExitLoop:
        states, kv = network.iterate(params, loop.states, e, view, loop.kv, loop.index, loop.active)
        moved = dataclasses.replace(loop, index=loop.index + 1, states=states, kv=kv)
        since = loop.index - knobs.min_recurrence
        due = may_exit & (since >= 0) & (since % knobs.check_every == 0)
        return lax.cond(due, check, lambda same: same, moved)

    states = network.latents(state.cache, fed.positions)
    seen, read = states, None
    if criterion.looks_at == "logits":
        seen = jnp.zeros(jax.eval_shape(network.logits, params, states[:, 0]).shape, jnp.float32)
        read = jnp.zeros_like(states[:, :1]), kv.coda
    loop = ExitLoop(
        index=jnp.int32(0),
        states=states,
        kv=kv,
        active=~state.rows.done,
        previous=criterion.init(seen),
        read=read,
        checks=jnp.zeros(len(valid), jnp.int32),
        exit_values=jnp.full((len(valid), steps), jnp.nan, jnp.float32),
    )
    if decoder.bounded:  # all steps, masked, so that reverse mode can cross the loop
        loop = lax.scan(lambda loop, _: (body(loop), None), loop, length=steps)[0]
    else:
        loop = lax.while_loop(lambda loop: (loop.index < steps) & jnp.any(loop.active), body, loop)
    return loop, read_out(loop)


def commit_exit(
    decoder: Any,
    params: Any,
    state: CachedState,
    fed: Inputs,
    knobs: Any,
    loop: ExitLoop,
    out: Forward,
) -> tuple[CachedState, AdaptiveInfo]:
    """Commits what the last position of a window predicts, and stores the window."""
    rows = state.rows.spend(out.counts, fed.widths)
    rows, token = decoder.commit_next(params, rows, out.hidden, knobs)
    cache = decoder.network.write(state.cache, out.kv, write_after_read(fed.at, token))
    if decoder.continuous:
        last = last_of(loop.states, fed.widths)
        cache = decoder.network.start_from(cache, last, fed.at + fed.widths)
    return CachedState(rows, cache), AdaptiveInfo(loop.kv.depth, loop.exit_values)
