"""Wide in, narrow out (WINO, arXiv 2507.18578): many positions are revealed a call, and those that
look wrong once the others are there are masked again.

::

    canvas     p p | a _ c _        the block's positions, of which b shadows carry the numbers
    shadows          _ _ _ _        shadow j sees the canvas but for position j, and the shadows

A shadow says of a standing token what the network expects in its place, given all others; no
position of the canvas sees a shadow.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.canvas import (
    CanvasDecoder,
    CanvasKnobs,
    CanvasState,
    Filled,
    by_chunks,
)
from paradec_jax.decode.machine import SHARE, Number, Request, knob
from paradec_jax.decode.rules import number_of, score, select, window
from paradec_jax.records import choices, pytree

FIRST = 30  # positions that the call before a block's first one counts as having revealed
PART, LEAST, MOST = 0.7, 5, 20  # of a block's masks that a call reveals at most


@pytree
class WinoKnobs(CanvasKnobs):
    """Sampling, and the two thresholds.

    Attributes:
      threshold: tau, which a confidence must exceed; None is 0.6.
      back: tau_back, below which a standing token's probability has it masked again; 0.9 by
        default.
    """

    threshold: Number | None = knob(None, SHARE, unset=0.6)
    back: Number = knob(0.9, SHARE)


@pytree
class WinoState(CanvasState):
    """A canvas whose open block is not sealed before it is complete.

    Attributes:
      last: positions that the last call in the block revealed, [B].
    """

    last: Int[Array, "B"]


@pytree
class Revoked(Filled):
    """What a call revealed, and what it masked again.

    Attributes:
      back: probability of each standing token of the block by its shadow, 0 elsewhere, [B, W].
      again: positions that were masked again, [B, W].
    """

    back: Float[Array, "B W"]
    again: Array


@choices
class Wino(CanvasDecoder):
    """Reveals what is surer than tau and masks again what its shadow doubts, block after block.

    Fewer positions are masked again than the call before revealed, so each call of a block but the
    first gains at least one, and a row of n new positions ends within n calls. A row commits whole
    blocks.

    Attributes:
      length: B; None for the whole canvas as one block.
      order, confidence, stops_last, guided, chunk: as of `SemiAutoregressive`.
    """

    length: int | None = 128
    Knobs = WinoKnobs
    alignments = ("own",)
    WORDS = {**CanvasDecoder.WORDS, "rule": ("threshold",)}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: Any) -> WinoState:
        """Fills the canvas with masks; calls nothing."""
        blank = self.blank(request, knobs, self.block)
        return WinoState(**vars(blank), last=jnp.zeros_like(blank.todo))

    def step(self, params: Any, state: WinoState, knobs: Any) -> tuple[WinoState, Revoked]:
        """One call on the canvas and the shadows of each row's open block."""
        state, opens = state.opened()
        last = jnp.where(opens, FIRST, state.last)
        at, masked = state.cached, state.masked(~state.rows.done)
        state, hidden, shadows = self.read_twice(params, state)

        # Wide in: all that exceed tau, at most a part of the masks, at least the surest.
        sure = self.weigh(params, state, hidden, at, masked, knobs)
        most = jnp.clip((PART * number_of(masked)).astype(jnp.int32), LEAST, MOST)
        above = number_of(masked & (sure.scores > knobs.threshold))
        where = select.top(sure.scores, masked, jnp.clip(above, 1, most))
        shown = number_of(where)

        # Narrow out: of the tokens that stood before, those whose shadow doubts them, where more
        # than one was revealed; fewer than the last call revealed, the least probable ones.
        standing = self.standing(state)
        back = self.doubts(params, state, shadows, standing)
        doubted = standing & (back < knobs.back) & (shown > 1)[:, None]
        again = select.top(-back, doubted, last - 1)

        new = state.show(sure.tokens, where, at, sure.log_probs).hide(again, at, self.mask)
        # A block is sealed once it is complete: until then any of its tokens may go.
        clean = select.leading_run(new.shown)
        new = new.seal(jnp.where(clean < new.rows.limit, new.block_at(clean), clean))
        new = dataclasses.replace(new, step=state.step + 1, last=shown)
        return new, Revoked(at, where, sure.tokens, sure.scores, hidden, back, again)

    def standing(self, state: WinoState) -> Array:
        """Tokens of the open block that were revealed, not given, [B, W]."""
        shown = state.shown & state.inside & ~state.given
        return window(shown, state.cached, self.block) & ~state.rows.done[:, None]

    def read_twice(
        self, params: Any, state: WinoState
    ) -> tuple[WinoState, Float[Array, "B W D"], Float[Array, "B W D"]]:
        """Hidden states about the open block, and about it by its shadows."""
        size, block, at = self.size, self.block, state.cached
        tokens, positions, _, sees = state.window(jnp.zeros_like(at), size)
        places = at[:, None] + jnp.arange(block)
        there = window(state.inside, at, block)
        masks = jnp.full_like(places, self.mask)
        # The canvas sees itself; shadow j the canvas but for position j, and all shadows.
        to_canvas = sees[:, :1] & (places[:, :, None] != positions[:, None])
        to_shadows = jnp.broadcast_to(there[:, None], (len(at), block, block))
        real = jnp.pad(sees, ((0, 0), (0, 0), (0, block)))
        sees = jnp.concatenate([real, jnp.concatenate([to_canvas, to_shadows], 2)], 1)
        out = self.read(
            params,
            state,
            jnp.concatenate([tokens, masks], axis=1),
            jnp.concatenate([positions, places], axis=1),
            None,
            sees,
        )
        spent = self.readings * (number_of(state.inside) + number_of(there))
        return state.spend(out.counts, spent), window(out.hidden, at, block), out.hidden[:, size:]

    def doubts(
        self, params: Any, state: WinoState, shadows: Array, standing: Array
    ) -> Float[Array, "B W"]:
        """Probability of each standing token by its shadow."""
        tokens = window(state.rows.tokens, state.cached, self.block)

        def of_some(hidden: Array, slots: Array) -> Array:
            own = jnp.take_along_axis(tokens, slots, axis=1, mode="clip")
            return score.probability(self.network.logits(params, hidden), own)

        return by_chunks(of_some, shadows, standing, self.chunk, self.bounded)
