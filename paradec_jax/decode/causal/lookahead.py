"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations collect n-grams, which are verified
beside them.

The window holds N - 1 levels of past Jacobi iterations over W future positions; one call iterates
all of them and verifies up to G n-grams that begin with the newest token. Slots of a call::

    level 0     t  a1 a2 a3          t: newest committed token        position of (level l, column c):
    level 1     b0 b1 b2 b3                                               that of t + l + c
    level 2     c0 c1 c2 c3   ->  d0 d1 d2 d3     the new level
    guesses     g0 g1 g2, h0 h1 h2, ..            each after t

Down each column, (t b0 c0 d0), (a1 b1 c1 d1), .. are the n-grams of the call, N = 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from paradec_jax.config import check_number
from paradec_jax.decode.causal.levels import Levels
from paradec_jax.decode.causal.ngrams import NGrams
from paradec_jax.decode.machine import (
    CachedState,
    DecoderBase,
    Forward,
    Prefix,
    RecordedDraws,
    RepetitionKnobs,
    Request,
    Rows,
    SamplingKnobs,
    accept,
    counted,
)
from paradec_jax.decode.rules import Purpose, earlier, entry_of, fold, window, write_after_read
from paradec_jax.records import choices, pytree


@pytree
class RecordedLookahead(RecordedDraws):
    """Recorded draws, `window` among them: level 0 without its first token, for all rows, [W + N -
    3].
    """

    window: Int[Array, " ahead"] | None = None


@pytree
class LookaheadState(CachedState):
    """Rows, a cache of all committed tokens but the newest, window and pool.

    Attributes:
      levels: the window.
      pool: n-grams of the calls so far, and of the text where that is asked for.
      guesses: those that begin with the newest token, without it, for the next call to verify; -1
        where there are fewer, [B, G, N - 1].
    """

    levels: Levels
    pool: NGrams
    guesses: Int[Array, "B G m"]

    @classmethod
    def begin(cls, rows: Rows, cache: Any, levels: Levels, pool: NGrams) -> "LookaheadState":
        """The state before a call, which has guesses once the window is full."""
        guesses = jnp.where(levels.full[:, None, None], pool.after(rows.newest[0]), -1)
        return cls(rows, cache, levels, pool, guesses)

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """The Jacobi iterate that the window goes on from."""
        return counted(self.levels.tokens[:, 0, 1:], self.levels.width - 1)


@pytree
class LookaheadInfo:
    """What one call saw and did.

    Attributes:
      guesses: verified n-grams without their first token, -1 where there are fewer, [B, G, N - 1].
      newest: most probable token after each item of the newest level, [B, W + N - 2].
      first: the network's choice after the newest committed token, [B].
      after: its choice after each token of the guesses, [B, G, N - 1].
      accepted: tokens of the best guess that were right, [B].
    """

    guesses: Int[Array, "B G m"]
    newest: Int[Array, "B columns"]
    first: Int[Array, "B"]
    after: Int[Array, "B G m"]
    accepted: Int[Array, "B"]


@choices
class Lookahead(DecoderBase):
    """Verifies n-grams that its own Jacobi iterations have found; each call commits 1 to N - 1
    tokens.

    The network's choice at a position is drawn with that position's noise, so that guesses are
    verified by exact speculative sampling (see `machine.verify.accept`), and the output is that of
    `AutoRegressive`, token for token, at every temperature. The levels take most probable tokens at
    every temperature: they are drafts.

    The prompt is read in one call together with level 0, whose tokens are drawn from the prompt. As
    in the original program the last token of a guess is computed, but never committed.

    The pool takes V G (N - 1) numbers a row: 17 MB for V = 152,000, G = 7, N = 5.

    Attributes:
      level: N, length of the n-grams, at least 3.
      window: W, positions ahead.
      guesses: G, n-grams verified a call, and kept for each first token.
      pool_from_prompt: whether n-grams of the prompt and of the committed text are kept as well.
    """

    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False
    Knobs = RepetitionKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("level", self.level, 3)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> LookaheadState:
        """Reads the prompt and level 0 in one call and commits the first token."""
        columns, length = self.window + self.level - 2, self.level - 1
        ahead = level_0(request, columns - 1)
        rows, cache, out = self.prefill_ahead(params, request, ahead, max(columns, self.level))
        rows = rows.spend(out.counts, request.lengths + columns - 1)
        fresh = jnp.argmax(self.network.logits(params, out.hidden), axis=-1).astype(jnp.int32)
        rows, token = self.commit_next(params, rows, out.hidden[:, :1], knobs)
        tokens = jnp.zeros((request.batch, length, columns), jnp.int32).at[:, 0, 1:].set(ahead)
        levels = Levels(tokens, jnp.zeros_like(rows.length)).advance(fresh, token)
        lists = (request.batch, self.network.vocab_size, self.guesses, length)
        pool = NGrams(jnp.full(lists, -1, jnp.int32))
        if self.pool_from_prompt:
            pool = pool.read_prompt(request.tokens, request.lengths)
            pool = pool.read(token, jnp.ones_like(request.lengths))
        return LookaheadState.begin(rows, cache, levels, pool)

    def step(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[LookaheadState, LookaheadInfo]:
        """One call: iterates the window, verifies the guesses, commits the one that is right the
        longest.
        """
        at, levels, guesses, length = state.cached, state.levels, state.guesses, self.level - 1

        # Lookahead branch: the window's new level. Verification branch: what the network chooses
        # after the newest token t and after each token of a guess.
        out, fresh, choices, scores = self._look(params, state, knobs)

        # Verify: the guess that is right the longest wins. Its last token is not looked at. The
        # prediction at its first place is the choice after t, which all guesses share.
        index = jnp.arange(self.guesses * length).reshape(-1, length).at[:, 0].set(0)
        tokens, scores = jax.tree.map(lambda x: x[:, index], (choices, scores))
        winner, accepted, _ = accept(guesses[..., :-1], tokens)
        tokens, scores = entry_of((tokens, scores), winner)

        # Commit it and the choice after it; store the keys and values of t and of the guess.
        count = jnp.sum(guesses[..., 0] >= 0, axis=1)
        positions = (levels.filled + 1) * levels.width + count * length
        rows = state.rows.spend(out.counts, positions).commit(tokens, accepted + 1, scores)
        first, guess = jnp.zeros_like(at), out.hidden.shape[1] - (self.guesses - winner) * length
        kv = self.network.pick(out.kv, first, 1)
        cache = self.network.write(state.cache, kv, write_after_read(at, tokens))
        cache = self.network.write(cache, self.network.pick(out.kv, guess, length), at + 1)

        # Collect the n-grams down the W columns of a full window, and those of the text.
        ngrams = jnp.concatenate([levels.tokens, fresh[:, None]], axis=1)[..., : self.window]
        full = jnp.broadcast_to(levels.full[:, None], (len(at), self.window))
        pool = state.pool.insert(ngrams.swapaxes(1, 2), full).read(tokens, accepted + 1)

        # Move the window on, and look up the guesses that begin with its first token.
        levels = levels.advance(fresh, jnp.take_along_axis(tokens, accepted[:, None], axis=1))
        after = choices[:, 1:].reshape(guesses.shape)
        info = LookaheadInfo(guesses, fresh, choices[:, 0], after, accepted)
        return LookaheadState.begin(rows, cache, levels, pool), info

    def _look(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[Forward, Array, Array, Array | None]:
        """The network on the window and the guesses.

        Returns:
          The call; the most probable token after each item of the newest level, [B, C]; the
          network's choice after the newest token, then after each token of the guesses, [B, 1 +
          G m]; log-probabilities of these choices.
        """
        levels, guesses, (batch, count, length) = state.levels, state.guesses, state.guesses.shape
        fed, ahead, mask = levels.beside(guesses)
        positions = state.cached[:, None] + ahead
        prefix = Prefix(state.cache, state.cached)
        out = self.network.forward(params, fed, positions, prefix, mask)

        # Slots of the newest level, of which `width` count; of t; of the guesses. Scores of the
        # older levels are not needed.
        hidden, last, columns = out.hidden, -count * length, levels.tokens.shape[2]
        newest = window(hidden, levels.filled * levels.width, columns)
        hidden = jnp.concatenate([newest, hidden[:, :1], hidden[:, last:]], axis=1)
        ahead, logits = jnp.split(self.network.logits(params, hidden), [columns], axis=1)
        fresh = jnp.argmax(ahead, axis=-1).astype(jnp.int32)

        chosen_at = jnp.concatenate([positions[:, :1], positions[:, last:]], axis=1) + 1
        seen = earlier(guesses)  # before the first token of any guess there is none
        later = seen[:, :, 1:].reshape(batch, -1, length)
        before = jnp.concatenate([seen[:, 0, :1], later], axis=1)
        choices = self.sample(logits, chosen_at, state.rows, knobs, before=before)
        return out, fresh, choices, self.scores(logits, choices)


def level_0(request: Request, ahead: int) -> Int[Array, "B ahead"]:
    """Level 0 without its first token: as recorded, or drawn from the prompt."""
    recorded = getattr(request.recorded, "window", None)
    if recorded is not None:
        return jnp.broadcast_to(recorded, (request.batch, ahead))
    keys = fold(request.keys, Purpose.DRAFT, request.lengths[:, None] + jnp.arange(ahead))
    draw = jax.vmap(lambda keys, n: jax.vmap(lambda key: jax.random.randint(key, (), 0, n))(keys))
    return jnp.take_along_axis(request.tokens, draw(keys, request.lengths), axis=1)
