"""One call of lookahead decoding: the window and the guesses go in, what is right of the best guess comes out.

The functions take a decoder with the fields `level` (N), `window` (W) and `guesses` (G).
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.causal import lookahead_window, ngrams
from paradec_jax.decode.causal.lookahead_window import Levels
from paradec_jax.decode.machine.decoder import CachedState
from paradec_jax.decode.machine.network import Counts, Prefix
from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.nn import masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedLookahead(RecordedDraws):
    """Recorded draws, `window` among them: level 0 without its first token, for all rows, [W + N - 3]."""

    window: Int[Array, " ahead"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState(CachedState):
    """Rows, a cache of all committed tokens but the newest, window and pool.

    Attributes:
      rows, cache: as in every decoder.
      levels: the window.
      pool: n-grams by their first token, see `ngrams`, [B, V, G, N - 1].
      recent: the newest N - 1 tokens of the text that the pool has read, -1 where there are fewer, [B, N - 1]; None
        where it reads no text.
    """

    levels: Levels
    pool: Int[Array, "B V G m"]
    recent: Int[Array, "B m"] | None

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """The Jacobi iterate that the window goes on from; guesses are looked up by the call that verifies them."""
        return self.levels.drafts


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What a call returns.

    Attributes:
      newest: most probable token after each item of the newest level, [B, W + N - 2].
      choices: the network's choice after the newest committed token, then after each token of the guesses,
        [B, 1 + G (N - 1)].
      scores: their log-probabilities, or None.
      kv: keys and values of all slots.
      counts: what the call took.
    """

    newest: Int[Array, "B columns"]
    choices: Int[Array, "B slots"]
    scores: Float[Array, "B slots"] | None
    kv: Any
    counts: Counts


def check_sizes(level: int, window: int, guesses: int) -> None:
    """Refuses sizes without a meaning. Raises ValueError."""
    for name, value, least in (("level", level, 3), ("window", window, 1), ("guesses", guesses, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def read_prompt(
    decoder: Any, params: Any, request: Request, knobs: Any
) -> tuple[Rows, Any, Levels, Int[Array, "B 1"]]:
    """Reads the prompt and level 0 in one call: rows with the first token, cache, window, and that token."""
    columns = decoder.window + decoder.level - 2
    ahead = level_0(request, columns - 1)
    rows, cache, out = decoder.prefill_ahead(params, request, ahead, max(columns, decoder.level))
    rows = rows.spend(out.counts, request.lengths + columns - 1)
    fresh = jnp.argmax(decoder.network.logits(params, out.hidden), axis=-1).astype(jnp.int32)
    rows, token = decoder.commit_next(params, rows, out.hidden[:, :1], knobs)
    return rows, cache, lookahead_window.begin(ahead, fresh, token[:, 0], decoder.level), token


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


def find_guesses(state: LookaheadState) -> Int[Array, "B G m"]:
    """The n-grams of the pool that begin with the newest token, once the window is full; -1 for none."""
    guesses = ngrams.look_up(state.pool, state.rows.newest[0][:, 0])
    return jnp.where(state.levels.full[:, None, None], guesses, -1)


def look(decoder: Any, params: Any, state: LookaheadState, guesses: Int[Array, "B G m"], knobs: Any) -> Seen:
    """Runs the network on the window and the guesses."""
    network, rows, levels = decoder.network, state.rows, state.levels
    batch, count, length = guesses.shape
    slots = levels.slots
    chains = jnp.broadcast_to(jnp.tile(jnp.arange(1, length + 1), count), (batch, count * length))
    fed = jnp.concatenate([levels.flat(), jnp.maximum(guesses, 0).reshape(batch, -1)], axis=1)
    positions = state.cached[:, None] + jnp.concatenate([levels.ahead(), chains], axis=1)
    mask = masks.lookahead(*levels.places(), count, length)
    out = network.forward(params, fed, positions, Prefix(state.cache, state.cached), mask)

    # Scores of the older levels are not needed.
    verifying = jnp.concatenate([out.hidden[:, :1], out.hidden[:, slots:]], axis=1)
    logits = network.logits(params, jnp.concatenate([levels.newest(out.hidden), verifying], axis=1))
    drafts, logits = logits[:, : levels.columns], logits[:, levels.columns :]
    chosen_at = rows.length[:, None] + jnp.pad(chains, ((0, 0), (1, 0)))
    choices = decoder.sample(logits, chosen_at, rows, knobs)
    return Seen(
        newest=jnp.argmax(drafts, axis=-1).astype(jnp.int32),
        choices=choices,
        scores=decoder.scores(logits, choices),
        kv=out.kv,
        counts=out.counts,
    )


def best_guess(
    seen: Seen, guesses: Int[Array, "B G m"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B m"], Float[Array, "B m"] | None]:
    """Which guess is right the longest, how many of its tokens are, what to commit, and its log-probabilities.

    The last token of a guess is not looked at, as in the original program: it is never committed.
    """
    choices = in_place(seen.choices, guesses.shape)
    right = guesses[..., :-1] == choices[..., :-1]
    accepted = jax.vmap(select.leading_run)(right)
    best = jnp.argmax(accepted, axis=1)
    scores = None if seen.scores is None else _of_guess(in_place(seen.scores, guesses.shape), best)
    return best, jnp.max(accepted, axis=1), _of_guess(choices, best), scores


def in_place(x: Array, shape: tuple[int, ...]) -> Array:
    """What belongs in the place of each token of the guesses, [B, G, N - 1], of what was chosen after each."""
    after = x[:, 1:].reshape(shape)
    first = jnp.broadcast_to(x[:, :1, None], (*shape[:2], 1))
    return jnp.concatenate([first, after[..., :-1]], axis=-1)


def store(
    decoder: Any, state: LookaheadState, seen: Seen, best: Int[Array, "B"], tokens: Int[Array, "B m"]
) -> Any:
    """The cache with the newest token and the best guess; what is not accepted of it is scratch."""
    network, length = decoder.network, decoder.level - 1
    newest = network.pick(seen.kv, jnp.zeros_like(best), 1)
    cache = network.write(state.cache, newest, write_after_read(state.cached, tokens))
    chain = network.pick(seen.kv, state.levels.slots + best * length, length)
    return network.write(cache, chain, state.cached + 1)


def shown(guesses: Int[Array, "B G m"]) -> Int[Array, "B"]:
    """How many guesses there are."""
    return jnp.sum(guesses[..., 0] >= 0, axis=1)


def collect(
    decoder: Any, state: LookaheadState, seen: Seen, guesses: Int[Array, "B G m"], accepted: Int[Array, "B"]
) -> Int[Array, "B V G m"]:
    """The pool with the n-grams down the columns of a full window."""
    # The second condition always holds. It puts every read of the old pool before the insertion, as
    # `write_after_read` does.
    full = state.levels.full & (accepted + shown(guesses) >= 0)
    full = jnp.broadcast_to(full[:, None], (full.shape[0], decoder.window))
    return ngrams.insert(state.pool, state.levels.ngrams(seen.newest, decoder.window), full)


def info(seen: Seen, guesses: Int[Array, "B G m"], accepted: Int[Array, "B"]) -> LookaheadInfo:
    """What recorders read."""
    after = seen.choices[:, 1:].reshape(guesses.shape)
    return LookaheadInfo(guesses, seen.newest, seen.choices[:, 0], after, accepted)


def _of_guess(x: Array, index: Int[Array, "B"]) -> Array:
    """The guess of each row that an index names."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
