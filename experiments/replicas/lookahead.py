"""Lookahead decoding as the released program keeps n-grams of its text (arXiv 2402.02057).

Where a call accepts several tokens the program appends the last of them once for each, to the text that it reads
n-grams from::

    text        .. x y | a b c          accepted: a b c
    it reads    .. x y | c c c

So some n-grams of its pool are wrong, which costs calls, never tokens.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from paradec_jax.decode.causal import lookahead_call as call
from paradec_jax.decode.causal import ngrams
from paradec_jax.decode.causal.lookahead_call import LookaheadInfo, LookaheadState
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.request import Request


@dataclasses.dataclass(frozen=True)
class ReleasedLookahead(DecoderBase):
    """`Lookahead` with `pool_from_prompt` as released; without it the program is `Lookahead` itself.

    Attributes:
      level, window, guesses: N, W and G.
    """

    _: dataclasses.KW_ONLY
    level: int = 5
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        call.check_sizes(self.level, self.window, self.guesses)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> LookaheadState:
        """Reads the prompt and level 0 and commits the first token."""
        rows, cache, levels, token = call.read_prompt(self, params, request, knobs)
        length = self.level - 1
        pool = ngrams.empty(request.batch, self.network.vocab_size, self.guesses, length)
        pool = ngrams.insert_text(pool, request.tokens, request.lengths)
        prompt = ngrams.tail(request.tokens, request.lengths, length)
        pool, recent = ngrams.read_on(pool, prompt, token, jnp.ones_like(request.lengths))
        return LookaheadState(rows, cache, levels, pool, recent)

    def step(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[LookaheadState, LookaheadInfo]:
        """One call: iterate the window, verify guesses, commit the longest one that is right."""
        guesses = call.find_guesses(state)
        seen = call.look(self, params, state, guesses, knobs)
        best, accepted, tokens, scores = call.best_guess(seen, guesses)
        cache = call.store(self, state, seen, best, tokens)
        rows = state.rows.spend(seen.counts, state.levels.size + call.shown(guesses) * (self.level - 1))
        rows = rows.commit(tokens, accepted + 1, scores)
        newest = jnp.take_along_axis(tokens, accepted[:, None], axis=1)
        pool = call.collect(self, state, seen, guesses, accepted)
        repeated = jnp.broadcast_to(newest, tokens.shape)
        pool, recent = ngrams.read_on(pool, state.recent, repeated, accepted + 1)
        levels = state.levels.advance(seen.newest, newest[:, 0])
        return LookaheadState(rows, cache, levels, pool, recent), call.info(seen, guesses, accepted)
