"""Self-speculative denoising (SSD, arXiv 2510.04147): one position a step, several steps a call.

::

    canvas        p p _ _ _ _          drafts of the last call: c at 4, then a at 2
    candidates    p p _ _ c _          the first draft alone
                  p p a _ c _          both
    verified      after the first the surest mask is 2, its token a: both are kept

Each candidate is the canvas after one draft more. A draft is right if it is what the step on the
candidate before it would do; the first one is, since the last call said so. So the texts are those
of a position a call, in its order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas import (
    CanvasDecoder,
    CanvasState,
    Weighed,
    read_canvas,
    read_whole,
)
from paradec_jax.decode.machine import Request
from paradec_jax.decode.rules import entry_of, number_of, select
from paradec_jax.records import choices, pytree


@pytree
class SpeculativeState(CanvasState):
    """A canvas, and what the last call says about it.

    Attributes:
      sure: the token for each mask, and how sure it is, [B, S].
    """

    sure: Weighed


@pytree
class Accepted:
    """What a call did.

    Attributes:
      places: positions of the drafts, the surest first, [B, K].
      accepted: how many of them were kept, [B].
    """

    places: Int[Array, "B K"]
    accepted: Int[Array, "B"]


@choices
class SpeculativeDenoising(CanvasDecoder):
    """`SemiAutoregressive` of one position a step without a cache, K steps a call where drafts are
    right.

    A call reads K candidates of each row as a batch: attention in both directions forbids them a
    shared past. A row of n new positions ends within n + 1 calls.

    Attributes:
      tries: K, drafts of a call.
      length, order, confidence, stops_last, guided, chunk: as of `SemiAutoregressive`.
      rule: "static", one position a step.
    """

    tries: int = 4
    rule: str = "single"
    WORDS = {**CanvasDecoder.WORDS, "rule": ("single",)}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: Any) -> SpeculativeState:
        """Reads the canvas of masks: what it says are the first drafts."""
        state, hidden = read_whole(self, params, self.blank(request, knobs, self.block))
        state = state.opened()[0]
        sure = self.weigh(params, state, hidden, start_of(state), open_of(self, state), knobs)
        return SpeculativeState(**vars(state), sure=sure)

    def step(
        self, params: Any, state: SpeculativeState, knobs: Any
    ) -> tuple[SpeculativeState, Accepted]:
        """One call on K candidates of each row: as many steps as drafts are right."""
        state, _ = state.opened()
        # Drafts (q_1, v_1), (q_2, v_2), ..: the surest masks of the block, with their tokens.
        ranked, index = self.ranked(state, state.sure), jnp.arange(min(self.tries, self.block))
        places = select.best(ranked, len(index))
        drafts = jnp.take_along_axis(state.sure.tokens, places, axis=1)
        left = jnp.sum(ranked > -jnp.inf, axis=1)

        # Candidate i is the canvas with the first i + 1 drafts: all are read as one batch.
        def candidate(i: Array) -> tuple[Weighed, Array, Any]:
            new = self.with_drafts(state, places, i + 1, left)
            out = read_canvas(self, params, new, start_of(new), self.size, None)
            sure = self.weigh(params, new, out.hidden, start_of(new), open_of(self, new), knobs)
            return sure, self.ranked(new, sure), out.counts

        sure, ranks, counts = jax.vmap(candidate, out_axes=(1, 1, 0))(index)
        # Draft i + 1 is right if the step on candidate i reveals that position with that token.
        surest = jnp.argmax(ranks, axis=-1).astype(jnp.int32)
        tokens = jnp.take_along_axis(sure.tokens, surest[..., None], axis=-1)[..., 0]
        right = (surest == jnp.roll(places, -1, 1)) & (tokens == jnp.roll(drafts, -1, 1))
        tried = jnp.minimum(left, len(index))
        right &= index + 1 < tried[:, None]
        accepted = jnp.where(state.rows.done, 0, 1 + select.leading_run(right))

        # The last accepted candidate is the canvas, and what was said of it gives the next drafts.
        new = self.with_drafts(state, places, accepted, left, sure.log_probs)
        new = new.spend(
            jax.tree.map(lambda x: jnp.sum(x, axis=0), counts),
            self.readings * tried * number_of(state.inside),
        )
        new = dataclasses.replace(new, sure=entry_of(sure, jnp.maximum(accepted - 1, 0)))
        return new.seal(), Accepted(places, accepted)

    def ranked(self, state: CanvasState, sure: Weighed) -> Float[Array, "B S"]:
        """Scores of the masks of each row's open block, -inf elsewhere."""
        ours = open_of(self, state) & (jnp.arange(self.size) < (state.cached + self.block)[:, None])
        return jnp.where(ours, jnp.nan_to_num(sure.scores), -jnp.inf)

    def with_drafts(
        self,
        state: SpeculativeState,
        places: Int[Array, "B K"],
        count: Any,
        left: Int[Array, "B"],
        said: Float[Array, "B K S"] | None = None,
    ) -> SpeculativeState:
        """The canvas with the first drafts, at the step after them.

        Args:
          places, left: positions of the drafts, and masks of the block before them.
          count: how many of them, a number or one a row.
          said: log-probabilities by each candidate, where they are kept.
        """
        hits = places[:, :, None] == jnp.arange(self.size)
        rank = jnp.where(jnp.any(hits, axis=1), jnp.argmax(hits, axis=1), places.shape[1])
        real = rank < jnp.reshape(jnp.minimum(count, left), (-1, 1))
        log_probs = state.sure.log_probs
        if log_probs is not None and said is not None:  # the draft before says what comes next
            each = jnp.concatenate([log_probs[:, None], said[:, :-1]], axis=1)
            log_probs = jnp.take_along_axis(each, rank[:, None], axis=1, mode="clip")[:, 0]
        new = state.show(state.sure.tokens, real, start_of(state), log_probs)
        step = jnp.where(count >= left, 0, state.step + count)
        return dataclasses.replace(new, step=step)


def start_of(state: CanvasState) -> Int[Array, "B"]:
    """Position 0 of each row."""
    return jnp.zeros_like(state.cached)


def open_of(decoder: Any, state: CanvasState) -> Bool[Array, "B S"]:
    """Masks of each row."""
    return state.open[:, : decoder.size]
