"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations collect n-grams, which are verified
beside them.

The window holds N - 1 levels of past Jacobi iterations over W future positions; one call iterates
all of them and verifies up to G n-grams that begin with the newest token. Slots of a call::

    level 0     t  a1 a2 a3          t: newest committed token        position of (level l, column c):
    level 1     b0 b1 b2 b3                                               that of t + l + c
    level 2     c0 c1 c2 c3   ->  d0 d1 d2 d3     the new level
    guesses     g0 g1 g2, h0 h1 h2, ..            each after t

Down each column, (t b0 c0 d0), (a1 b1 c1 d1), .. are the n-grams of the call, N = 4.

A window begins with level 0 alone, of C = W + N - 2 columns. A call adds a level and takes a
column, until N - 1 levels have W columns; from then on levels move up (N = 4, W = 2, C = 4)::

    filled = 0         1             2              2, full: levels move up
    t a a a            t a a         t a            t b
                       b b b         b b            c c
                                     c c            d d

The pool keeps, for each token, its G most recently used continuations, from the least to the most
recently used, after empty places of -1, [B, V, G, N - 1]. A list that drops its least recently used
entry when it is full holds the most recently used distinct ones; so any number of insertions is
done at once.
"""

import dataclasses
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from paradec_jax.config.bounds import check_number
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import RepetitionKnobs, SamplingKnobs
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import earlier
from paradec_jax.decode.rules.windows import entry_of, window, write_after_read
from paradec_jax.nn import masks

CHUNK = 64  # n-grams of a prompt that are inserted at once: work grows with its square


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedLookahead(RecordedDraws):
    """Recorded draws, `window` among them: level 0 without its first token, for all rows, [W + N -
    3].
    """

    window: Int[Array, " ahead"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Levels:
    """The window of each row; what lies beyond its levels and columns is meaningless.

    Attributes:
      tokens: tokens by level and column, of which the first is the newest committed one, [B, N - 1,
        C].
      filled: levels beside level 0, N - 2 when the window is full, [B].
    """

    tokens: Int[Array, "B levels columns"]
    filled: Int[Array, "B"]

    @property
    def width(self) -> Int[Array, "B"]:
        """Columns that a level has now."""
        return self.tokens.shape[2] - self.filled

    @property
    def full(self) -> Bool[Array, "B"]:
        """Whether all N - 1 levels are there."""
        return self.filled == self.tokens.shape[1] - 1

    def places(self) -> tuple[Int[Array, "B slots"], Int[Array, "B slots"]]:
        """Level and column of each slot of a call, row by row; slots after the last level mean
        nothing.
        """
        _, levels, columns = self.tokens.shape
        slots = max((s + 1) * (columns - s) for s in range(1, levels))  # of the largest window
        return jnp.divmod(jnp.arange(slots), self.width[:, None])

    def fed(self) -> tuple[Int[Array, "B slots"], Int[Array, "B slots"]]:
        """The token of each slot, and how far it stands after the newest token."""
        level, column = self.places()
        batch, levels, columns = self.tokens.shape
        index = jnp.minimum(level, levels - 1) * columns + column
        tokens = jnp.take_along_axis(self.tokens.reshape(batch, -1), index, axis=1)
        return tokens, jnp.minimum(
            level + column, columns - 1
        )  # none further than those that mean something

    def newest(self, x: Shaped[Array, "B W *rest"]) -> Shaped[Array, "B columns *rest"]:
        """What belongs to the newest level, of an array over all slots of a call; the first `width`
        count.
        """
        return window(x, self.filled * self.width, self.tokens.shape[2])

    def advance(self, fresh: Int[Array, "B columns"], token: Int[Array, "B"]) -> "Levels":
        """The window one position on: a full one moves its levels up, another one gets a level.

        Args:
          fresh: the new level, the token after each item of the newest one.
          token: the newest committed token.
        """
        levels = self.tokens.shape[1]
        up = jnp.concatenate([self.tokens[:, 1:], fresh[:, None]], axis=1)
        added = self.filled[:, None] + 1 == jnp.arange(levels)
        left = jnp.roll(jnp.where(added[..., None], fresh[:, None], self.tokens), -1, axis=2)
        tokens = jnp.where(self.full[:, None, None], up, left).at[:, 0, 0].set(token)
        return Levels(tokens, jnp.minimum(self.filled + 1, levels - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState(CachedState):
    """Rows, a cache of all committed tokens but the newest, window and pool.

    Attributes:
      levels: the window.
      pool: n-grams by their first token, [B, V, G, N - 1].
      recent: the newest N - 1 tokens of the text that the pool has read, -1 where there are fewer,
        [B, N - 1]; None where it reads no text.
    """

    levels: Levels
    pool: Int[Array, "B V G m"]
    recent: Int[Array, "B m"] | None

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """The Jacobi iterate that the window goes on from; guesses are looked up by the call that
        verifies them.
        """
        level_0 = self.levels.tokens[:, 0]
        return jnp.where(jnp.arange(level_0.shape[1]) < self.levels.width[:, None], level_0, -1)[
            :, 1:
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Lookahead(DecoderBase):
    """Verifies n-grams that its own Jacobi iterations have found; each call commits 1 to N - 1
    tokens.

    The network's choice at a position is drawn with that position's noise, so that guesses are
    verified by exact speculative sampling (see `PromptLookup`), and the output is that of
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

    _: dataclasses.KW_ONLY
    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False
    Knobs: ClassVar[type] = RepetitionKnobs

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
        levels = Levels(tokens, jnp.zeros_like(rows.length)).advance(fresh, token[:, 0])
        pool = jnp.full(
            (request.batch, self.network.vocab_size, self.guesses, length), -1, jnp.int32
        )
        state = LookaheadState(rows, cache, levels, pool, None)
        return state if not self.pool_from_prompt else read_prompt(state, request, token)

    def step(
        self, params: Any, state: LookaheadState, knobs: SamplingKnobs
    ) -> tuple[LookaheadState, LookaheadInfo]:
        """One call: iterates the window, verifies guesses, commits the longest one that is right."""
        rows, at, levels, length = state.rows, state.cached, state.levels, self.level - 1
        # Guesses: the n-grams of the pool that begin with the newest token, once the window is
        # full.
        guesses = jax.vmap(lambda lists, token: lists[token])(state.pool, rows.newest[0][:, 0])
        guesses = jnp.where(levels.full[:, None, None], guesses, -1)
        count = jnp.sum(guesses[..., 0] >= 0, axis=1)

        # Lookahead branch: the window's new level. Verification branch: what the network chooses
        # after the newest token and after each token of a guess.
        out, fresh, choices, scores = self._look(params, state, guesses, knobs)

        # The guess that is right the longest; its last token is not looked at, as it is never
        # committed.
        tokens, scores = jax.tree.map(lambda x: in_place(x, guesses.shape), (choices, scores))
        matches = jax.vmap(select.leading_run)(guesses[..., :-1] == tokens[..., :-1])
        best, accepted = jnp.argmax(matches, axis=1), jnp.max(matches, axis=1)
        tokens, scores = entry_of((tokens, scores), best)

        # Commit it and the choice after it; keep the keys and values of the newest token and of the
        # guess.
        rows = rows.spend(out.counts, (levels.filled + 1) * levels.width + count * length)
        rows = rows.commit(tokens, accepted + 1, scores)
        newest, guess = jnp.zeros_like(best), out.hidden.shape[1] - (self.guesses - best) * length
        kv = self.network.pick(out.kv, newest, 1)
        cache = self.network.write(state.cache, kv, write_after_read(at, tokens))
        cache = self.network.write(cache, self.network.pick(out.kv, guess, length), at + 1)

        # Collect the n-grams down the columns of a full window and, where asked for, those of the
        # text.
        grams = jnp.concatenate([levels.tokens, fresh[:, None]], axis=1)[
            ..., : self.window
        ].swapaxes(1, 2)
        # The second condition always holds: it puts every read of the pool before the write
        # (`write_after_read`).
        full = (levels.full & (accepted + count >= 0))[:, None]
        pool = insert(state.pool, grams, jnp.broadcast_to(full, grams.shape[:2]))
        pool, recent = read_on(pool, state.recent, tokens, accepted + 1)

        # Move the window on.
        levels = levels.advance(fresh, jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0])
        after = choices[:, 1:].reshape(guesses.shape)
        info = LookaheadInfo(guesses, fresh, choices[:, 0], after, accepted)
        return LookaheadState(rows, cache, levels, pool, recent), info

    def _look(
        self, params: Any, state: LookaheadState, guesses: Int[Array, "B G m"], knobs: SamplingKnobs
    ) -> tuple[
        Forward, Int[Array, "B columns"], Int[Array, "B slots"], Float[Array, "B slots"] | None
    ]:
        """The network on the window and the guesses.

        Returns:
          The call; the most probable token after each item of the newest level; the network's
          choice after the newest token, then after each token of the guesses, [B, 1 + G (N - 1)];
          log-probabilities of these choices.
        """
        levels, (batch, count, length) = state.levels, guesses.shape
        slots, ahead = levels.fed()
        places = jnp.broadcast_to(
            jnp.tile(jnp.arange(1, length + 1), count), (batch, count * length)
        )
        fed = jnp.concatenate([slots, jnp.maximum(guesses, 0).reshape(batch, -1)], axis=1)
        positions = state.cached[:, None] + jnp.concatenate([ahead, places], axis=1)
        mask = masks.lookahead(*levels.places(), count, length)
        out = self.network.forward(params, fed, positions, Prefix(state.cache, state.cached), mask)
        # Scores of the older levels are not needed.
        newest, columns = levels.newest(out.hidden), levels.tokens.shape[2]
        hidden = jnp.concatenate(
            [newest, out.hidden[:, :1], out.hidden[:, slots.shape[1] :]], axis=1
        )
        logits = self.network.logits(params, hidden)
        fresh, logits = (
            jnp.argmax(logits[:, :columns], axis=-1).astype(jnp.int32),
            logits[:, columns:],
        )
        chosen_at = state.rows.length[:, None] + jnp.pad(places, ((0, 0), (1, 0)))
        seen = earlier(guesses)  # before the first token of any guess there is none
        before = jnp.concatenate(
            [seen[:, 0, :1], seen[:, :, 1:].reshape(batch, -1, length)], axis=1
        )
        choices = self.sample(logits, chosen_at, state.rows, knobs, before=before)
        return out, fresh, choices, self.scores(logits, choices)


def level_0(request: Request, ahead: int) -> Int[Array, "B ahead"]:
    """Level 0 without its first token: as recorded, or drawn from the prompt.

    Raises:
      ValueError: a recorded window of another shape.
    """
    recorded = request.recorded
    if isinstance(recorded, RecordedLookahead) and recorded.window is not None:
        chex.assert_shape(
            recorded.window, (ahead,), custom_message="recorded.window", exception_type=ValueError
        )
        return jnp.broadcast_to(recorded.window, (request.batch, ahead))
    keys = fold(request.keys, Purpose.DRAFT, request.lengths[:, None] + jnp.arange(ahead))
    draw = jax.vmap(lambda keys, n: jax.vmap(lambda key: jax.random.randint(key, (), 0, n))(keys))
    return jnp.take_along_axis(request.tokens, draw(keys, request.lengths), axis=1)


def in_place(x: Shaped[Array, "B slots"], shape: tuple[int, ...]) -> Shaped[Array, "B G m"]:
    """What belongs in the place of each token of the guesses, of what was chosen after the newest
    token and each.
    """
    after = x[:, 1:].reshape(shape)
    first = jnp.broadcast_to(x[:, :1, None], (*shape[:2], 1))
    return jnp.concatenate([first, after[..., :-1]], axis=-1)


# The pool


@jax.vmap
def insert(
    lists: Int[Array, "V G m"], ngrams: Int[Array, "M n"], valid: Bool[Array, "M"]
) -> Int[Array, "V G m"]:
    """Inserts n-grams, n = m + 1, in the order of their use into the pool of each row, those that
    are valid.

    One that is there already becomes the most recently used.
    """
    vocab, places = lists.shape[:2]
    keys, new = ngrams[:, 0], ngrams[:, 1:]
    alike = (keys[:, None] == keys) & valid[:, None] & valid
    later = jnp.triu(jnp.ones_like(alike), 1)
    last = ~jnp.any(
        alike & later & jnp.all(new[:, None] == new, axis=-1), axis=1
    )  # uses of the same n-gram

    # Every n-gram makes the list of its key anew: old entries that are not used now, then the new
    # ones in order.
    old = lists[keys]
    again = jnp.all(old == new[:, None], axis=-1)  # [M, G]
    unused = ~jnp.any(alike[:, :, None] & again, axis=1) & (old[..., 0] >= 0)
    kept = jnp.concatenate([unused, alike & last], axis=1)
    order = jnp.argsort(kept * jnp.arange(1, kept.shape[1] + 1), axis=1)[:, -places:]
    entries = jnp.concatenate([old, jnp.broadcast_to(new, (len(new), *new.shape))], axis=1)
    made = jnp.take_along_axis(entries, order[..., None], axis=1)
    made = jnp.where(jnp.take_along_axis(kept, order, axis=1)[..., None], made, -1)
    return lists.at[jnp.where(valid, keys, vocab)].set(made, mode="drop")


def insert_text(
    pool: Int[Array, "B V G m"], tokens: Int[Array, "B P"], lengths: Int[Array, "B"]
) -> Int[Array, "B V G m"]:
    """Inserts every n-gram of each row's first `lengths` tokens, n = m + 1."""
    n, width = pool.shape[-1] + 1, tokens.shape[1]
    starts = jnp.arange(-(-width // CHUNK) * CHUNK).reshape(-1, CHUNK)

    def some(pool: Array, starts: Array) -> tuple[Array, None]:
        at = starts[:, None] + jnp.arange(n)
        return insert(
            pool, tokens[:, jnp.minimum(at, width - 1)], at[:, -1] < lengths[:, None]
        ), None

    return lax.scan(some, pool, starts)[0]


def read_on(
    pool: Int[Array, "B V G m"],
    recent: Int[Array, "B m"] | None,
    tokens: Int[Array, "B K"],
    count: Int[Array, "B"],
) -> tuple[Int[Array, "B V G m"], Int[Array, "B m"] | None]:
    """Inserts the n-grams that end in the first `count` of some new tokens of a text.

    `recent` are the newest m = n - 1 tokens of what the pool has read of the text, and are returned
    as they are after these; None where it reads none.
    """
    if recent is None:
        return pool, None
    size = recent.shape[1]
    text = jnp.concatenate([recent, tokens], axis=1)
    end = jnp.arange(tokens.shape[1])
    grams = text[:, end[:, None] + jnp.arange(size + 1)]
    pool = insert(pool, grams, (end < count[:, None]) & (grams[..., 0] >= 0))
    return pool, window(text, count, size)


def read_prompt(
    state: LookaheadState, request: Request, token: Int[Array, "B 1"]
) -> LookaheadState:
    """The state whose pool has read the prompt and the first token after it."""
    size = state.pool.shape[-1]
    pool = insert_text(state.pool, request.tokens, request.lengths)
    padded = jnp.pad(request.tokens, ((0, 0), (size, 0)), constant_values=-1)
    recent = window(padded, request.lengths, size)
    pool, read = read_on(pool, recent, token, jnp.ones_like(request.lengths))
    return dataclasses.replace(state, pool=pool, recent=read)
