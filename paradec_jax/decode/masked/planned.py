"""Path planning (P2, arXiv 2502.03540): in every call all new positions are ranked anew, and the
least sure are masked, whether they were masks before or tokens.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax.decode.canvas import CanvasDecoder, CanvasState, Filled, read_whole
from paradec_jax.decode.machine import UNLIMITED
from paradec_jax.decode.rules import number_of, select
from paradec_jax.records import choices


@choices
class Planned(CanvasDecoder):
    """Fills the canvas in N steps, after which ever fewer positions are masks.

    ::

        step    canvas         masks left after it      4 new positions, N = 4
        0       a _ _ _        3
        1       _ b _ d        2                        a is masked again
        2       a b _ d        1
        3       a b c d        0

    In step i of N a token is drawn for each new position, those that stand among them. The
    floor(n (1 - (i + 1) / N)) positions whose drawn token is the least probable are masked;
    other masks take their token, and what stands stays. A row commits nothing before its end.

    Attributes:
      length: None, since all positions compete.
      rule: "static", N calls.
      order, confidence, stops_last, guided, chunk: as of `SemiAutoregressive`.
    """

    length: int | None = None
    rule: str = "static"
    WORDS = {**CanvasDecoder.WORDS, "rule": ("static",)}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None:
            raise ValueError(
                f"Planned ranks the whole canvas, so length must be None, not {self.length}"
            )

    def step(self, params: Any, state: CanvasState, knobs: Any) -> tuple[CanvasState, Filled]:
        """One call on the canvas: all new positions are ranked."""
        state, _ = state.opened()
        state, hidden = read_whole(self, params, state)
        start, size = jnp.zeros_like(state.cached), self.size

        # A token for each new position, its probability the rank.
        ours = self.ours(state)
        sure = self.weigh(params, state, hidden, start, ours, knobs)

        # The least sure ones are masks after this step, the others tokens: their own, or the drawn.
        total = number_of(ours)
        steps = jnp.minimum(jnp.where(knobs.steps == UNLIMITED, total, knobs.steps), total)
        left = total * (steps - state.step - 1) // jnp.maximum(steps, 1)
        hidden_again = select.top(-sure.scores, ours, left)
        where = state.open[:, :size] & ~hidden_again
        new = state.show(sure.tokens, where, start, sure.log_probs)
        new = new.hide(hidden_again, start, self.mask)
        new = new.seal(jnp.where(left == 0, state.rows.limit, start))
        return dataclasses.replace(new, step=state.step + 1), Filled(
            start, where, sure.tokens, sure.scores, hidden
        )

    def ours(self, state: CanvasState) -> Array:
        """Positions that were not given, of rows that run, [B, S]."""
        ours = state.inside & ~state.given & ~state.rows.done[:, None]
        return ours[:, : self.size]
