"""Early commit of the answer (Prophet, arXiv 2508.19982): once the network is sure of the answer's
positions, all that is still masked is revealed at once.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.canvas import (
    COUNTED,
    CanvasDecoder,
    CanvasKnobs,
    CanvasState,
    Filled,
    Weighed,
    read_whole,
)
from paradec_jax.decode.machine import COUNT, NOT_NEGATIVE, UNLIMITED, Number, Whole, knob
from paradec_jax.decode.rules import number_of, positions_of, score
from paradec_jax.records import choices, pytree


@pytree
class ProphetKnobs(CanvasKnobs):
    """Of `SemiAutoregressive` without a cache, and when to commit.

    Attributes:
      answer_at: new positions before the answer; what is given among them counts.
      answer: positions of the answer.
      early, middle, late: gap between the two largest logits, in the mean over the answer, from
        which all is revealed: before 0.33 of the steps are done, before 0.67, and after.
    """

    answer_at: Whole = knob(0, NOT_NEGATIVE)
    answer: Whole = knob(5, COUNT)
    early: Number = knob(7.5, NOT_NEGATIVE)
    middle: Number = knob(5.0, NOT_NEGATIVE)
    late: Number = knob(2.5, NOT_NEGATIVE)


@pytree
class Committed(Filled):
    """What a call revealed.

    Attributes:
      gap: mean gap of the two largest logits at the answer's positions, [B].
      exits: rows whose masks were all revealed for it, [B].
    """

    gap: Float[Array, "B"]
    exits: Bool[Array, "B"]


@choices
class Prophet(CanvasDecoder):
    """`SemiAutoregressive` without a cache, until the answer is sure; then the whole canvas is
    revealed.

    ::

        canvas    p p | a b _ _ | _ _ _ _ is _ _ | _ _        the answer's two positions after "is"
        gap                                 8 7               7.5 on average: every mask is revealed

    Where the answer stands is told by the caller: as a rule text is given before it
    (`make_request(given=...)`). A gap that is never reached changes nothing.

    Attributes:
      length, order, confidence, stops_last, guided, chunk: as of `SemiAutoregressive`.
      rule: "static", "rounded", "grid" or "capped", whose steps are counted.
    """

    rule: str = "static"
    Knobs = ProphetKnobs
    WORDS = {**CanvasDecoder.WORDS, "rule": COUNTED}  # noqa: RUF012

    def step(self, params: Any, state: CanvasState, knobs: Any) -> tuple[CanvasState, Committed]:
        """One call on the canvas: a step in each row's open block, or all of it."""
        state, _ = state.opened()
        state, count = self.due(state, number_of(state.masked(~state.rows.done)), knobs)
        state, hidden = read_whole(self, params, state)
        positions = positions_of(hidden)
        open_, place = state.open[:, : self.size], positions - state.rows.prompt_lengths[:, None]
        answer = (place >= knobs.answer_at) & (place < knobs.answer_at + knobs.answer)
        answer &= state.inside[:, : self.size]

        # A token for every mask; what the block's rule reveals.
        start = jnp.zeros_like(state.cached)
        sure = self.weigh(params, state, hidden, start, open_ | answer, knobs)
        masked = open_ & (positions < (state.cached + self.block)[:, None])
        where = self.reveals(sure.scores, masked, count, state.step, knobs)

        # The gap over the answer against the bound of this part of the steps: then all masks.
        gap = jnp.sum(sure.more * answer, axis=1) / jnp.maximum(jnp.sum(answer, axis=1), 1)
        done = self.progress(state, knobs)
        bound = jnp.where(
            done < 0.33, knobs.early, jnp.where(done < 0.67, knobs.middle, knobs.late)
        )
        exits = (gap >= bound) & ~state.rows.done
        where = jnp.where(exits[:, None], open_, where)
        new = state.show(sure.tokens, where, start, sure.log_probs).seal()
        new = dataclasses.replace(new, step=state.step + 1)
        return new, Committed(start, where, sure.tokens, sure.scores, hidden, gap, exits)

    def judge(self, logits: Float[Array, "B C V"], *args: Any) -> Weighed:
        """As of every decoder of a canvas; and the gap between the two largest logits."""
        return dataclasses.replace(super().judge(logits, *args), more=score.gap(logits))

    def progress(self, state: CanvasState, knobs: Any) -> Float[Array, "B"]:
        """Share of a row's steps that are done with this call."""
        first, block = state.rows.prompt_lengths, self.block
        steps = jnp.where(knobs.steps == UNLIMITED, block, knobs.steps)
        blocks = -(-(state.rows.limit - first) // block)
        done = (state.cached - first) // block * steps + state.step + 1
        return done / (blocks * steps)
