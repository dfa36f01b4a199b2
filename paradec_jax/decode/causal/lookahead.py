"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations collect n-grams, which are verified beside them.

The window holds N - 1 levels of past Jacobi iterations over W future positions; one call iterates all of them and
verifies up to G n-grams that begin with the newest token. Slots of a call::

    level 0     t  a1 a2 a3          t: newest committed token        position of (level l, column c):
    level 1     b0 b1 b2 b3                                               that of t + l + c
    level 2     c0 c1 c2 c3   ->  d0 d1 d2 d3     the new level
    guesses     g0 g1 g2, h0 h1 h2, ..            each behind t

Down each column, (t b0 c0 d0), (a1 b1 c1 d1), .. are the n-grams of the call, N = 4.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import ngrams, select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after, newest
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import log_probability
from paradec_jax.nn import masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState:
    """Rows, cache (one entry less than committed tokens), window and pool.

    A window begins with level 0 alone, of W + N - 2 columns. A call adds a level and takes a column, until N - 1
    levels have W columns; from then on levels move up. What lies beyond is meaningless.

    Attributes:
      progress: the rows.
      cache: keys and values of the positions before the newest token.
      levels: the window; its first token is the newest committed one, [B, N - 1, W + N - 2].
      filled: levels beside level 0, N - 2 when the window is full, [B].
      pool: n-grams by their first token, see `ngrams`, [B, V, G, N - 1].
      recent: the newest N - 1 tokens of the text that the pool has read, -1 where there are fewer, [B, N - 1].
      accepted: tokens of the best guess that were right in the newest call, [B].
    """

    progress: Progress
    cache: Any
    levels: Int[Array, "B levels columns"]
    filled: Int[Array, "B"]
    pool: Int[Array, "B V G m"]
    recent: Int[Array, "B m"]
    accepted: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What one call sees.

    Attributes:
      guesses: verified n-grams without their first token, -1 where there are fewer, [B, G, N - 1].
      newest: most probable token behind each item of the newest level, [B, W + N - 2].
      first: the network's choice behind the newest committed token, [B].
      behind: its choice behind each token of the guesses, [B, G, N - 1].
      scores: log-probabilities of `first` and `behind`, one after the other, or None.
      kv: keys and values of all slots.
    """

    guesses: Int[Array, "B G m"]
    newest: Int[Array, "B columns"]
    first: Int[Array, "B"]
    behind: Int[Array, "B G m"]
    scores: Float[Array, "B slots"] | None
    kv: Any


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
      official: keep what the release keeps of the committed text: it reads the last accepted token of a call once
        for each accepted one.
    """

    _: dataclasses.KW_ONLY
    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False
    official: bool = False
    Knobs: ClassVar[type] = AutoRegressiveKnobs

    def __post_init__(self) -> None:
        for name, least in (("level", 3), ("window", 1), ("guesses", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.official and not self.pool_from_prompt:
            raise ValueError("official changes what pool_from_prompt keeps, so it needs pool_from_prompt")

    @property
    def _columns(self) -> int:
        """Columns of level 0 before the first call."""
        return self.window + self.level - 2

    @property
    def _slots(self) -> int:
        """Slots of the largest window that is ever fed."""
        return max((s + 1) * (self._columns - s) for s in range(1, self.level - 1))

    def init(self, params: Any, request: Request, knobs: AutoRegressiveKnobs) -> LookaheadState:
        """Reads the prompt and level 0 and commits the first token."""
        if not hasattr(self.network, "pick"):
            raise ValueError(
                f"Lookahead needs a network with candidates in its window, not {type(self.network).__name__}"
            )
        batch, ahead = request.batch, self._columns - 1
        fill = self._random_tokens(request)
        scratch = max(self._columns, self.level)
        progress, cache, hidden = self.prefill_ahead(params, request, knobs, fill, scratch)
        progress = progress.count(1, request.lengths + ahead, self.network.recurrence)
        drafts = jnp.argmax(self.network.logits(params, hidden), axis=-1).astype(jnp.int32)
        progress, token = self.commit_next(params, progress, hidden[:, :1], knobs)

        pool = ngrams.empty(batch, self.network.vocab_size, self.guesses, self.level - 1)
        if self.pool_from_prompt:
            pool = ngrams.insert_text(pool, request.tokens, request.lengths)
        before = jnp.pad(request.tokens, ((0, 0), (self.level - 1, 0)), constant_values=-1)
        recent = stop.window(before, request.lengths, self.level - 1)
        pool, recent = self._read(pool, recent, token, jnp.ones_like(request.lengths))

        levels = jnp.zeros((batch, self.level - 1, self._columns), jnp.int32).at[:, 0, 1:].set(fill)
        filled = jnp.zeros_like(request.lengths)
        levels = self._roll(levels, drafts, filled, token[:, 0])
        return LookaheadState(progress, cache, levels, filled + 1, pool, recent, filled)

    def step(self, params: Any, state: LookaheadState, knobs: AutoRegressiveKnobs) -> LookaheadState:
        """One call: iterate the window, verify guesses, commit the longest one that is right."""
        return self.advance(state, self.look(params, state, knobs))

    def look(self, params: Any, state: LookaheadState, knobs: AutoRegressiveKnobs) -> Seen:
        """Runs the network on the window and the guesses."""
        network, progress, slots, length = self.network, state.progress, self._slots, self.level - 1
        batch, at = progress.length.shape[0], progress.length - 1
        level, column = jnp.divmod(jnp.arange(slots), (self._columns - state.filled)[:, None])
        token = jnp.take_along_axis(
            state.levels.reshape(batch, -1), jnp.minimum(level, length - 1) * self._columns + column, axis=1
        )
        guesses = ngrams.look_up(state.pool, newest(progress)[0][:, 0])
        guesses = jnp.where(self._full(state)[:, None, None], guesses, -1)
        fed = jnp.concatenate([token, jnp.maximum(guesses, 0).reshape(batch, -1)], axis=1)
        chains = jnp.broadcast_to(
            jnp.tile(jnp.arange(1, self.level), self.guesses), (batch, fed.shape[1] - slots)
        )
        ahead = jnp.concatenate([level + column, chains], axis=1)
        mask = masks.lookahead(level, column, self.guesses, length)
        out = network.forward(params, fed, at[:, None] + ahead, state.cache, at, window_mask=mask)

        # Scores of the older levels are not needed.
        start = state.filled * (self._columns - state.filled)
        last_level = stop.window(out.hidden, start, self._columns)
        verifying = jnp.concatenate([out.hidden[:, :1], out.hidden[:, slots:]], axis=1)
        logits = network.logits(params, jnp.concatenate([last_level, verifying], axis=1))
        drafts, logits = logits[:, : self._columns], logits[:, self._columns :]
        positions = progress.length[:, None] + jnp.pad(chains, ((0, 0), (1, 0)))
        choices = self.sample(logits, positions, progress, knobs)
        return Seen(
            guesses=guesses,
            newest=jnp.argmax(drafts, axis=-1).astype(jnp.int32),
            first=choices[:, 0],
            behind=choices[:, 1:].reshape(guesses.shape),
            scores=log_probability(logits, choices) if self.log_probs else None,
            kv=out.kv,
        )

    def advance(self, state: LookaheadState, seen: Seen) -> LookaheadState:
        """Commits what was right of the best guess, stores its keys, collects n-grams, moves the window on."""
        progress, length = state.progress, self.level - 1
        batch, cached = progress.length.shape[0], progress.length - 1
        choices = _in_place(seen.first, seen.behind)
        right = seen.guesses[..., :-1] == choices[..., :-1]
        hits = select.prefix(right.reshape(-1, length - 1)).reshape(batch, self.guesses)
        best, hit = jnp.argmax(hits, axis=1), jnp.max(hits, axis=1)
        tokens = _row(choices, best)
        scores = None
        if seen.scores is not None:
            behind = seen.scores[:, 1:].reshape(seen.behind.shape)
            scores = _row(_in_place(seen.scores[:, 0], behind), best)

        cache = self.network.write(
            state.cache, self.network.pick(seen.kv, jnp.zeros_like(best), 1), after(cached, tokens)
        )
        chain = self.network.pick(seen.kv, self._slots + best * length, length - 1)
        cache = self.network.write(cache, chain, cached + 1)

        shown = jnp.sum(seen.guesses[..., 0] >= 0, axis=1)
        window = (state.filled + 1) * (self._columns - state.filled)
        progress = progress.count(1, window + shown * length, self.network.recurrence)
        progress = stop.commit(progress, tokens, hit + 1, scores)

        columns = jnp.concatenate([state.levels, seen.newest[:, None]], axis=1)[..., : self.window]
        # The second condition always holds. It puts every read of the old pool before the insertion, as in `after`.
        full = self._full(state) & (hit + shown >= 0)
        full = jnp.broadcast_to(full[:, None], (batch, self.window))
        pool = ngrams.insert(state.pool, columns.swapaxes(1, 2), full)
        pool, recent = self._read(pool, state.recent, tokens, hit + 1)
        last = jnp.take_along_axis(tokens, hit[:, None], axis=1)[:, 0]
        return LookaheadState(
            progress=progress,
            cache=cache,
            levels=self._roll(state.levels, seen.newest, state.filled, last),
            filled=jnp.minimum(state.filled + 1, self.level - 2),
            pool=pool,
            recent=recent,
            accepted=hit,
        )

    def _full(self, state: LookaheadState) -> Bool[Array, "B"]:
        return state.filled == self.level - 2

    def _random_tokens(self, request: Request) -> Int[Array, "B columns"]:
        """Level 0 without its first token, drawn from the prompt."""
        ahead, recorded = self._columns - 1, request.recorded
        if recorded is not None and recorded.window is not None:
            if recorded.window.shape != (ahead,):
                raise ValueError(f"recorded.window must have shape {(ahead,)}, not {recorded.window.shape}")
            return jnp.broadcast_to(recorded.window, (request.batch, ahead))
        keys = fold(request.keys, Purpose.DRAFT, request.lengths[:, None] + jnp.arange(ahead))
        draw = jax.vmap(lambda keys, n: jax.vmap(lambda key: jax.random.randint(key, (), 0, n))(keys))
        return jnp.take_along_axis(request.tokens, draw(keys, request.lengths), axis=1)

    def _roll(
        self,
        levels: Int[Array, "B levels columns"],
        fresh: Int[Array, "B columns"],
        filled: Int[Array, "B"],
        last: Int[Array, "B"],
    ) -> Int[Array, "B levels columns"]:
        """The window one position on: a full one moves its levels up, another one gets a level."""
        up = jnp.concatenate([levels[:, 1:], fresh[:, None]], axis=1)
        behind = filled[:, None] + 1 == jnp.arange(levels.shape[1])
        left = jnp.roll(jnp.where(behind[..., None], fresh[:, None], levels), -1, axis=2)
        full = filled == self.level - 2
        return jnp.where(full[:, None, None], up, left).at[:, 0, 0].set(last)

    def _read(
        self,
        pool: Int[Array, "B V G m"],
        recent: Int[Array, "B m"],
        tokens: Int[Array, "B K"],
        count: Int[Array, "B"],
    ) -> tuple[Int[Array, "B V G m"], Int[Array, "B m"]]:
        """Keeps the n-grams that end in the first `count` of some new tokens."""
        if not self.pool_from_prompt:
            return pool, recent
        if self.official:
            tokens = jnp.broadcast_to(jnp.take_along_axis(tokens, count[:, None] - 1, axis=1), tokens.shape)
        text = jnp.concatenate([recent, tokens], axis=1)
        end = jnp.arange(tokens.shape[1])
        grams = text[:, end[:, None] + jnp.arange(self.level)]
        pool = ngrams.insert(pool, grams, (end < count[:, None]) & (grams[..., 0] >= 0))
        return pool, stop.window(text, count, self.level - 1)


def _in_place(first: Array, behind: Array) -> Array:
    """What belongs in the place of each token of the guesses: [B, G, N - 1] from [B] and [B, G, N - 1]."""
    start = jnp.broadcast_to(first[:, None, None], (*behind.shape[:2], 1))
    return jnp.concatenate([start, behind[..., :-1]], axis=-1)


def _row(x: Array, index: Int[Array, "B"]) -> Array:
    """The guess of each row that an index names."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
