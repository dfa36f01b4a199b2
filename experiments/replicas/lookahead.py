"""Lookahead decoding as the released program keeps n-grams of its text (arXiv 2402.02057).

Where a call accepts several tokens the program appends the last of them once for each, to the text
that it reads n-grams from::

    text        .. x y | a b c          accepted: a b c
    it reads    .. x y | c c c

So some n-grams of its pool are wrong, which costs calls, never tokens.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from paradec_jax.decode.causal.lookahead import Lookahead, LookaheadInfo, LookaheadState
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.request import Request


@dataclasses.dataclass(frozen=True)
class ReleasedLookahead(DecoderBase):
    """`Lookahead` with `pool_from_prompt` as released; without it the program is `Lookahead`
    itself.

    Attributes:
      level, window, guesses: N, W and G.
    """

    _: dataclasses.KW_ONLY
    level: int = 5
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        Lookahead(**vars(self))

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> LookaheadState:
        """Reads the prompt and level 0 and commits the first token."""
        return Lookahead(**vars(self), pool_from_prompt=True).init(params, request, knobs)

    def step(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[LookaheadState, LookaheadInfo]:
        """A call of `Lookahead` that reads no text; then the pool reads the newest token once for
        each accepted.
        """
        recent, silent = state.pool.recent, dataclasses.replace(state.pool, recent=None)
        state = dataclasses.replace(state, pool=silent)
        state, info = Lookahead(**vars(self)).step(params, state, knobs)
        repeated = jnp.broadcast_to(state.rows.newest[0], (len(info.accepted), self.level - 1))
        pool = dataclasses.replace(state.pool, recent=recent)
        pool = pool.read(repeated, info.accepted + 1)
        return LookaheadState.begin(state.rows, state.cache, state.levels, pool), info
