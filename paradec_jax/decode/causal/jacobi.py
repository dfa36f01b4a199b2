"""Jacobi decoding of causal models: draft a window, compare it with the network's own predictions,
keep what agrees.

::

    fed          x  d1 d2 d3 d4      x the newest committed token, d the draft after it
    predictions  g0 g1 g2 g3 g4      g_i the token that belongs after fed token i
    accepted        =  =  /          d1 = g0, d2 = g1, d3 != g2: m = 2 drafts
    committed    g0 g1 g2            m + 1 tokens; g3 g4 begin the next draft

The first prediction follows from committed tokens alone, and each accepted draft makes the next one
follow from them too. So the output is that of autoregressive decoding, whatever the draft was
(Santilli et al. 2023; Jacobi Forcing).

With several blocks, drafts reach beyond the block that is verified (Jacobi Forcing, Algorithm 1; K
= 3, n = 4)::

    position     s               s + 4           s + 8           s + 12
    window       [ a  a  x  d    | p  p  p  p    |  not spawned ]
                   real-active     pseudo        ^ window_end
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import MOST, check_number
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import SHARE, RepetitionKnobs, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.randomness import Purpose, uniform
from paradec_jax.decode.rules.windows import entry_of, shift, window, write_after_read

EMPTY = -1  # no token: equal to none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiKnobs(RepetitionKnobs):
    """Sampling, and when a block is spawned.

    Attributes:
      spawn: r, share of the newest block that must agree with its prediction before the next block
        is spawned; at 0 all blocks are in flight from the start. None is 0.5 (the paper: 0.85), and
        the only choice with one block.
    """

    spawn: Float[Array, ""] | float | None = knob(None, SHARE, unset=0.5, needs=("blocks", 2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiState(CachedState):
    """Rows, a cache of all committed tokens but the newest, and what is guessed about the tokens to
    come.

    Attributes:
      candidates: guesses of the W - 1 tokens after the committed ones, [B, R, W - 1]: the draft,
        then the others.
      window_end: position at which the window ends, [B]; nothing is accepted from there on.
      pool: earlier iterates, the newest first, [B, G, W + 1].
      uniforms: number in [0, 1) that draws the random fill token of each position, [B, S].
    """

    candidates: Int[Array, "B R drafts"]
    window_end: Int[Array, "B"]
    pool: Int[Array, "B G _"]
    uniforms: Float[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiInfo:
    """The winning candidate of a call (0 for the draft), its m tokens that agree, and tokens
    committed, [B] each.
    """

    winner: Int[Array, "B"]
    accepted: Int[Array, "B"]
    committed: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Jacobi(DecoderBase):
    """Verifies a window of W = `blocks * block` tokens a call; commits the accepted drafts and the
    token after them.

    Unlike Algorithm 1: pseudo blocks are refreshed whole in every call and keep no prefix that was
    accepted there; a block is promoted where the window reaches it; only the newest one spawns,
    with random tokens; the pool holds whole iterates; alternatives of the draft's first guess are
    tried too. With a pool a call computes all W tokens.

    When sampling, each position keeps its Gumbel noise from step to step, so a prediction is a
    function of the tokens before it and the output is, token for token, that of `AutoRegressive`
    with the same keys.

    Attributes:
      block: n, tokens of a block; the first token fed is the newest committed one.
      blocks: K, blocks in flight at most: the one that is verified and the pseudo blocks after it.
      running: refill the window to its full width after every step (the running window). By default
        it shrinks until its block is complete and the next block starts from a random draft (block
        Jacobi).
      pool: G, earlier iterates that are searched for candidates (rejection recycling).
      candidates: R, candidates verified in a call: the draft, those of the pool, then the draft
        with its first token replaced by the next-best ones. 1 + `pool` when None.
      recurrence: r of a call, for networks of recurrent depth; the network's when None.
      prefill_recurrence: r of the prompt and of the first draft after it; that of a call when None.
    """

    _: dataclasses.KW_ONLY
    block: int = 16
    blocks: int = 1
    running: bool = False
    pool: int = 0
    candidates: int | None = None
    recurrence: int | None = None
    prefill_recurrence: int | None = None
    Knobs: ClassVar[type] = JacobiKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("block", self.block, 2)  # one token drafts nothing
        check_number(
            "blocks", self.blocks, 1, getattr(self.network, "max_length", MOST) // self.block
        )
        if self.running and self.blocks > 1:
            raise ValueError(
                f"a running window has no blocks, so blocks must be 1, not {self.blocks}"
            )
        if self.num_candidates < 1 + bool(self.pool):
            raise ValueError(
                f"candidates (1 + pool where None) must be at least 1, 2 with a pool, not {self.num_candidates}"
            )
        network = self.network
        if network is not None and (self.recurrence, self.prefill_recurrence) != (None, None):
            if "recurrences" not in network.counters:
                raise ValueError(
                    "recurrence and prefill_recurrence are for networks of recurrent depth"
                )
            object.__setattr__(self, "network", network.at(self.recurrence))

    @property
    def width(self) -> int:
        """W, tokens fed of a candidate."""
        return self.blocks * self.block

    @property
    def num_candidates(self) -> int:
        """R."""
        return 1 + self.pool if self.candidates is None else self.candidates

    def init(self, params: Any, request: Request, knobs: JacobiKnobs) -> JacobiState:
        """Reads each prompt and W - 1 random tokens after it in one call: the first token, the
        first iterate.
        """
        uniforms = uniform(request.keys, Purpose.FILLER, self.limits()[0] + self.width)
        draft = self._fill(uniforms, request.tokens, request.lengths)
        reader = (
            None if self.prefill_recurrence is None else self.network.at(self.prefill_recurrence)
        )
        rows, cache, out = self.prefill_ahead(params, request, draft, self.width, reader)
        tokens, logits = (
            x[:, 0] for x in self.predict(params, rows, knobs, out.hidden[:, None], draft[:, None])
        )
        rows = rows.spend(out.counts, request.lengths + self.width - 1)
        rows = rows.commit(tokens, jnp.ones_like(rows.length), self.scores(logits, tokens))
        candidates = jnp.repeat(tokens[:, None, 1:], self.num_candidates, axis=1)
        pool = jnp.full((request.batch, self.pool, self.width + 1), EMPTY, jnp.int32)
        nothing = jnp.zeros_like(tokens[:, 1:], bool)
        end = self.next_end(rows, request.lengths - 1, request.lengths, nothing, knobs.spawn)
        return JacobiState(rows, cache, candidates, end, pool, uniforms)

    def step(
        self, params: Any, state: JacobiState, knobs: JacobiKnobs
    ) -> tuple[JacobiState, JacobiInfo]:
        """One iteration in the manner of Algorithm 1, in one network call for all candidates of all
        rows.
        """
        before, at, end, drafts = state.rows, state.cached, state.window_end, state.candidates

        # Assemble the window: the newest token, then each candidate's guesses of the tokens after
        # it.
        newest = jnp.broadcast_to(before.newest[0][:, None], (*drafts.shape[:2], 1))
        fed = jnp.concatenate([newest, drafts], axis=2)
        # One candidate where all repeat the draft; one block until another is spawned, but with a
        # pool all of them, since it remembers what was predicted beyond the window's end.
        count = jnp.where(jnp.any(drafts != drafts[:, :1], axis=(1, 2)), self.num_candidates, 1)
        # Verify: the candidate whose guesses agree longest wins, and m of them are accepted.
        call = forward_tree(
            self.network,
            params,
            Prefix(state.cache, at),
            Windows.star(fed, at, count * ~before.done),
            functools.partial(self._verify, params, state, knobs, count),
            width=end - at,
            widths=() if self.pool else (self.block,),
            bounded=self.bounded,
        )
        (tokens, log_probs, agrees), (winner, m, best) = call.one, call.rest

        # Commit them and the token after them, which follows from them.
        rows = before.spend(call.counts, call.positions).commit(tokens, m + 1, log_probs)
        cache = self.network.write(state.cache, call.kv, write_after_read(at, tokens))

        # Spawn a block where the newest one agrees on a share r; promote the next one where it is
        # reached.
        new_end = self.next_end(rows, at, end, agrees[:, :-1], knobs.spawn)
        # Refresh: what the winner predicts up to the old end is the draft; what nothing predicts
        # yet is random.
        known = jnp.minimum(end - at, self.width)[:, None] - (m[:, None] + 1)
        fill = self._fill(state.uniforms, rows.tokens, rows.length)
        draft = jnp.where(jnp.arange(self.width - 1) < known, shift(tokens, m + 1)[:, :-1], fill)
        # Recycle: a rejected iterate may hold the right tokens at the wrong place (section 4).
        drafts = self._with_others(draft, state.pool, rows, best, known)
        iterate = jnp.concatenate([before.newest[0], tokens], axis=1)
        pool = jnp.concatenate([iterate[:, None], state.pool], axis=1)[:, : self.pool]
        info = JacobiInfo(winner, m, rows.length - before.length)
        return JacobiState(rows, cache, drafts, new_end, pool, state.uniforms), info

    def _verify(
        self,
        params: Any,
        state: JacobiState,
        knobs: Any,
        count: Int[Array, "B"],
        hidden: Float[Array, "B r w D"],
    ) -> Reading:
        """The winner's tokens, log-probabilities and agreement; which one it is, its m, and the
        next-best tokens.
        """
        tokens, logits = self.predict(params, state.rows, knobs, hidden, state.candidates)
        candidates, width = tokens.shape[1:]
        # A guess agrees if it is what the token before it predicts, as far as the window goes.
        inside = state.rows.length[:, None] + jnp.arange(width - 1) < state.window_end[:, None]
        computed = jnp.arange(candidates) < count[:, None]
        guesses = state.candidates[:, :candidates, : width - 1]
        agrees = (guesses == tokens[:, :, :-1]) & inside[:, None] & computed[:, :, None]
        # The candidate of the longest leading agreement wins, the first among equals.
        matches = jax.vmap(select.leading_run)(agrees)
        winner, m = jnp.argmax(matches, axis=1), jnp.max(matches, axis=1)
        own, agrees, likely = entry_of((tokens, agrees, logits), winner)
        log_probs = self.scores(likely, own)
        best = None
        if (
            self.num_candidates > 1
        ):  # read where the next draft begins, by one slice: the others are large
            at = winner * width + jnp.minimum(m + 1, width - 1)
            after = window(logits.reshape(len(at), -1, logits.shape[-1]), at, 1)[:, 0]
            best = select.best(after, self.num_candidates)[:, 1:]
        return Reading(one=(own, log_probs, agrees), rest=(winner, m, best), kept=winner)

    def drafts(self, state: JacobiState) -> Int[Array, "B drafts"]:
        """The draft of the W - 1 tokens after the committed ones, as far as the window goes."""
        position = state.rows.length[:, None] + jnp.arange(self.width - 1)
        return jnp.where(position < state.window_end[:, None], state.candidates[:, 0], -1)

    def next_end(
        self, rows: Rows, at: Array, old: Array, agrees: Array, spawn: Any
    ) -> Int[Array, "B"]:
        """The position at which the window of the next call ends; its first token, the newest,
        stands at length - 1.

        ::

            running       length - 1 + n             the window is always full
            one block     f + n                      f: start of the block of the newest token
            K blocks      old, + n where a block is spawned, from f + n to f + K n

        `old` is the end of the window that was fed from position `at` on, and `agrees` [B, W - 1]
        which of its guesses agree; `rows` are those after the commit.
        """
        newest, n = rows.length - 1, self.block
        if self.running:
            return newest + n
        first = rows.prompt_lengths + (newest - rows.prompt_lengths) // n * n
        # Tokens of the newest block that are committed, or lead it and agree with their prediction.
        begin, position = old - n, at[:, None] + 1 + jnp.arange(self.width - 1)
        earlier = position < begin[:, None]
        run = select.leading_run(agrees | earlier) - jnp.sum(earlier, axis=1)
        agreed = jnp.clip(at + 1 - begin, 0, n) + jnp.maximum(run, 0)
        spawned = old
        if self.blocks > 1:
            spawned += n * (agreed >= spawn * n - 1e-4)  # in float32 0.6 * 25 is above 15
            spawned = jnp.where(spawn <= 0, first + self.width, spawned)
        return jnp.clip(spawned, first + n, first + self.width)

    def _fill(self, uniforms: Array, tokens: Array, lengths: Array) -> Int[Array, "B drafts"]:
        """A token for each of the next W - 1 positions, drawn uniformly from those of the row."""
        drawn = jnp.floor(window(uniforms, lengths, self.width - 1) * lengths[:, None])
        return jnp.take_along_axis(tokens, drawn.astype(jnp.int32), axis=1)

    def _with_others(
        self, draft: Array, pool: Array, rows: Rows, best: Array | None, known: Array
    ) -> Int[Array, "B R drafts"]:
        """The draft, what followed the newest token in earlier iterates, and repairs of the draft's
        first guess.
        """
        if best is None:
            return draft[:, None]
        others = self.num_candidates - 1
        recycled, there = jax.vmap(jax.vmap(after_token, (0, None, None)))(
            pool, rows.newest[0][:, 0], draft
        )
        repairs = jnp.repeat(draft[:, None], others, axis=1).at[:, :, 0].set(best)
        valid = jnp.concatenate([there, jnp.broadcast_to(known > 0, repairs.shape[:2])], axis=1)
        return distinct(draft, jnp.concatenate([recycled, repairs], axis=1), valid, others + 1)


def after_token(
    iterate: Array, token: Array, draft: Array
) -> tuple[Int[Array, " drafts"], Bool[Array, ""]]:
    """What stood after a token's first occurrence in an iterate, completed by the draft; whether
    anything did.
    """
    hits = iterate[:-1] == token
    room = jnp.pad(iterate, (0, len(draft)), constant_values=EMPTY)
    stood = lax.dynamic_slice_in_dim(room, jnp.argmax(hits) + 1, len(draft))
    return jnp.where(stood == EMPTY, draft, stood), jnp.any(hits) & (stood[0] != EMPTY)


def distinct(
    draft: Int[Array, "B K"], others: Int[Array, "B M K"], valid: Bool[Array, "B M"], count: int
) -> Int[Array, "B R K"]:
    """The draft and the first candidates that are valid and new, `count` together.

    Where there are fewer, the rest are repetitions of the draft, which change nothing.
    """
    everything = jnp.concatenate([draft[:, None], others], axis=1)
    valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    equal = jnp.all(everything[:, :, None] == everything[:, None], axis=-1)
    new = valid & ~jnp.any(jnp.tril(equal, -1) & valid[:, None], axis=-1)
    order = jnp.argsort(~new, axis=1, stable=True)[:, :count]
    chosen = jnp.take_along_axis(everything, order[:, :, None], axis=1)
    return jnp.where(jnp.take_along_axis(new, order, axis=1)[:, :, None], chosen, draft[:, None])
