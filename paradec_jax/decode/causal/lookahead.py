"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations collect n-grams, which are verified beside them.

The window holds N - 1 levels of past Jacobi iterations over W future positions; one call iterates all of them and
verifies up to G n-grams that begin with the newest token. Slots of a call::

    level 0     t  a1 a2 a3          t: newest committed token        position of (level l, column c):
    level 1     b0 b1 b2 b3                                               that of t + l + c
    level 2     c0 c1 c2 c3   ->  d0 d1 d2 d3     the new level
    guesses     g0 g1 g2, h0 h1 h2, ..            each after t

Down each column, (t b0 c0 d0), (a1 b1 c1 d1), .. are the n-grams of the call, N = 4.
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
class Lookahead(DecoderBase):
    """Verifies n-grams that its own Jacobi iterations have found; each call commits 1 to N - 1 tokens.

    The network's choice at a position is drawn with that position's noise, so that guesses are verified by exact
    speculative sampling (see `PromptLookup`), and the output is that of `AutoRegressive`, token for token, at every
    temperature. The levels take most probable tokens at every temperature: they are drafts.

    The prompt is read in one call together with level 0, whose tokens are drawn from the prompt. As in the original
    program the last token of a guess is computed, but never committed.

    The pool takes V G (N - 1) numbers a row: 17 MB for V = 152,000, G = 7, N = 5.

    Attributes:
      level: N, length of the n-grams, at least 3.
      window: W, positions ahead.
      guesses: G, n-grams verified a call, and kept for each first token.
      pool_from_prompt: whether n-grams of the prompt and of the committed text are kept as well.
    """

    _: dataclasses.KW_ONLY
    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False

    def __post_init__(self) -> None:
        call.check_sizes(self.level, self.window, self.guesses)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> LookaheadState:
        """Reads the prompt and level 0 and commits the first token."""
        rows, cache, levels, token = call.read_prompt(self, params, request, knobs)
        length, recent = self.level - 1, None
        pool = ngrams.empty(request.batch, self.network.vocab_size, self.guesses, length)
        if self.pool_from_prompt:
            pool = ngrams.insert_text(pool, request.tokens, request.lengths)
            recent = ngrams.tail(request.tokens, request.lengths, length)
            pool, recent = ngrams.read_on(pool, recent, token, jnp.ones_like(request.lengths))
        return LookaheadState(rows, cache, levels, pool, recent)

    def step(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[LookaheadState, LookaheadInfo]:
        """One call: iterate the window, verify guesses, commit the longest one that is right."""
        # Lookahead branch and verification branch, in one call.
        guesses = call.find_guesses(state)
        seen = call.look(self, params, state, guesses, knobs)
        # Verify: the guess that is right the longest, and the network's choice after it.
        best, accepted, tokens, scores = call.best_guess(seen, guesses)
        cache = call.store(self, state, seen, best, tokens)
        rows = state.rows.spend(seen.counts, state.levels.size + call.shown(guesses) * (self.level - 1))
        rows = rows.commit(tokens, accepted + 1, scores)
        # Collect the n-grams of the columns and, where asked for, of the text.
        pool = call.collect(self, state, seen, guesses, accepted)
        pool, recent = ngrams.read_on(pool, state.recent, tokens, accepted + 1)
        # Move the window on.
        newest = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        levels = state.levels.advance(seen.newest, newest)
        return LookaheadState(rows, cache, levels, pool, recent), call.info(seen, guesses, accepted)
