"""Masked diffusion: a denoiser reveals a canvas of masks, many positions a call, in an order drawn beforehand."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.masked.unmask import (
    MaskedDecoder,
    MaskedKnobs,
    MaskedState,
    Unmasked,
    begin,
    plain_draw,
    unmask,
)


@dataclasses.dataclass(frozen=True)
class Masked(MaskedDecoder):
    """Reveals a canvas in groups that were drawn at random, one network call each.

    ::

        canvas   _ _ _ _ _ _ _ _
        call 1   _ e _ _ _ f _ _      {1, 5}
        call 2   a e _ c _ f _ g      {0, 3, 7}
        call 3   a e b c _ f h g      {2, 6}, and so on

    With order "random" the law of the text is that of ancestral sampling over N steps (MDLM, arXiv 2406.07524; with
    or without its cache, and of the analytic sampler, which is the same for this network), without the steps in which
    nothing happens; "single" is its limit for N to infinity, a position a call. The network does not know the time,
    so each row keeps its own: a batch takes as many calls as its longest row has groups.

    The orders "confidence" (of the drawn token), "margin" and "entropy" reveal as many positions as the next group
    holds, but the surest. They change the law: what is written depends on where the network is sure.

    Attributes:
      order: "random", "single", "confidence", "margin" or "entropy".
      confidence: distribution that a score is taken from, "raw", "tempered" or "filtered" (see `rules.score.shaped`);
        None is the paper's: raw for "confidence" (LLaDA), filtered for "margin" and "entropy" (Dream).
      chunk: C, positions of a row whose logits exist at once.
    """

    def init(self, params: Any, request: Request, knobs: MaskedKnobs) -> MaskedState:
        """Fills the canvas with masks and draws their partition; calls nothing."""
        return begin(self, self.begin(request, 0), knobs)

    def step(self, params: Any, state: MaskedState, knobs: MaskedKnobs) -> tuple[MaskedState, Unmasked]:
        """One call on the canvas, for each row's next group."""
        at = jnp.zeros_like(state.rows.length)
        tokens, positions, open_, mask = state.window(at, self.size)
        out = self.network.forward(params, tokens, positions, None, mask)
        state = state.spend(out.counts, state.rows.limit)
        draw = plain_draw(self, state.rows, knobs)
        return unmask(self, params, state, out.hidden, at, state.groups, open_, draw, knobs)[:2]
