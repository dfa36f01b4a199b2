"""Jacobi decoding of causal models: draft a window, compare it with the network's own predictions, keep what agrees.

::

    fed          x  d1 d2 d3 d4      x the newest committed token, d the draft after it
    predictions  g0 g1 g2 g3 g4      g_i the token that belongs after fed token i
    accepted        =  =  /          d1 = g0, d2 = g1, d3 != g2: m = 2 drafts
    committed    g0 g1 g2            m + 1 tokens; g3 g4 begin the next draft

The first prediction follows from committed tokens alone, and each accepted draft makes the next prediction follow
from them too. So what is committed is what autoregressive decoding commits, whatever the draft was (Santilli et al.
2023; Jacobi Forcing, sections 3 and 4).

With several blocks, drafts reach beyond the block that is verified (Jacobi Forcing, Algorithm 1; K = 3, n = 4)::

    position     s               s + 4           s + 8           s + 12
    window       [ a  a  x  d    | p  p  p  p    |  not spawned ]
                   real-active     pseudo        ^ window_end

A pseudo block is a draft that every call refreshes. Once the newest block agrees with its prediction on a share r of
its tokens the next one is *spawned*, with random fill tokens. Once the accepted tokens reach a pseudo block it is
*promoted*: its tokens then follow from committed ones, so the same rule accepts them, maybe in the same call.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.causal import recycling
from paradec_jax.decode.causal.window_end import newest_block_agreement, window_end
from paradec_jax.decode.machine.candidates import Shape, fold_candidates, on_smallest, pick
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs, check_range, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.windows import pad_slots, shift, window, write_after_read

SPAWN = 0.5  # share of a block, where a knob is not set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiKnobs(SamplingKnobs):
    """Sampling, and when a block is spawned.

    Attributes:
      spawn: r, share of the newest block that must agree with its prediction before the next block is spawned; at 0
        all blocks are in flight from the start. None is 0.5, and the only choice with one block.
    """

    spawn: Float[Array, ""] | float | None = knob(None, unset=SPAWN, needs=("blocks", 2))

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        super().check()
        check_range(self.spawn, "spawn", lambda x: (x >= 0) & (x <= 1), "between 0 and 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiState(CachedState):
    """Rows, a cache of all committed tokens but the newest, and what is guessed about the tokens to come.

    Attributes:
      rows, cache: as in every decoder.
      candidates: guesses of the W - 1 tokens after the committed ones, [B, R, W - 1]: the draft, then the others.
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
    """What one call did.

    Attributes:
      winner: candidate with the longest agreement, 0 for the draft, [B].
      accepted: its tokens that agree, m, [B].
      committed: tokens committed, m + 1 unless a stop token or the budget cuts them, [B] (the fast-forward count).
    """

    winner: Int[Array, "B"]
    accepted: Int[Array, "B"]
    committed: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiCall:
    """What a call makes of the candidates; zeros beyond the width that it was fed.

    Attributes:
      winner, accepted: as in `JacobiInfo`.
      tokens: what the winner predicts, [B, W], and `agrees`, which of its guesses agree, [B, W - 1].
      log_probs: of these tokens, where they are kept, [B, W].
      after: logits of the token after those that are committed, [B, V]; None where there is one candidate alone.
      kv: keys and values of the winner.
      counts: what the call cost.
    """

    winner: Int[Array, "B"]
    accepted: Int[Array, "B"]
    tokens: Int[Array, "B W"]
    agrees: Bool[Array, "B drafts"]
    log_probs: Float[Array, "B W"] | None
    after: Float[Array, "B V"] | None
    kv: Any
    counts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Jacobi(DecoderBase):
    """Verifies a window of W = `blocks * block` tokens a call; commits the accepted drafts and the token after them.

    A call leaves out candidates that repeat the draft and blocks that are not spawned where no running row has any;
    `positions` counts what each row itself has of them.

    When sampling, each position keeps its Gumbel noise from step to step, so a prediction is a function of the tokens
    before it and the output is, token for token, that of `AutoRegressive` with the same keys.

    Attributes:
      block: n, tokens of a block; the first token fed is the newest committed one.
      blocks: K, blocks in flight at most: the one that is verified and the pseudo blocks after it.
      running: refill the window to its full width after every step (the running window). By default it shrinks
        until its block is complete and the next block starts from a random draft (block Jacobi).
      pool: G, earlier iterates that are searched for candidates (rejection recycling).
      candidates: R, candidates verified in a call: the draft and at most R - 1 others, those of the pool first, then
        `recycling.alternatives`. 1 + `pool` when None.
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
        if self.block < 2:
            raise ValueError(
                f"block must be at least 2, not {self.block}: a window of one token drafts nothing"
            )
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, not {self.blocks}")
        if self.running and self.blocks > 1:
            raise ValueError(f"a running window has no blocks, so blocks must be 1, not {self.blocks}")
        if self.pool < 0:
            raise ValueError(f"pool must not be negative, not {self.pool}")
        if self.candidates is not None and self.candidates < 1:
            raise ValueError(
                f"candidates must be at least 1, the draft, or None for 1 + pool, not {self.candidates}"
            )
        if self.pool and self.candidates == 1:
            raise ValueError("a pool gives candidates, so candidates must be at least 2 (or None), not 1")

    @property
    def width(self) -> int:
        """W, tokens fed of a candidate."""
        return self.blocks * self.block

    @property
    def num_candidates(self) -> int:
        """R."""
        return 1 + self.pool if self.candidates is None else self.candidates

    def init(self, params: Any, request: Request, knobs: JacobiKnobs) -> JacobiState:
        """Reads each prompt and W - 1 random tokens after it in one call: the first token, the first iterate."""
        self._check()
        (size, _), width = self.limits(), self.width
        # Drawn once: a position is filled at random at most a few times.
        positions = jnp.broadcast_to(jnp.arange(size + width), (request.batch, size + width))
        uniforms = jax.vmap(jax.vmap(jax.random.uniform))(fold(request.keys, Purpose.FILLER, positions))
        fill = _fill_tokens(uniforms, request.tokens, request.lengths, width - 1)
        depth = self.recurrence if self.prefill_recurrence is None else self.prefill_recurrence
        rows, cache, out = self.prefill_ahead(params, request, fill, width, self._at(depth))
        logits = self.network.logits(params, out.hidden)
        own = rows.length[:, None] + jnp.arange(width)
        predicted = self.sample(logits, own, rows, knobs)
        rows = rows.spend(out.counts, request.lengths + width - 1)
        rows = rows.commit(predicted, jnp.ones_like(rows.length), self.scores(logits, predicted))
        draft = jnp.broadcast_to(predicted[:, None, 1:], (request.batch, self.num_candidates, width - 1))
        pool = jnp.full((request.batch, self.pool, width + 1), recycling.EMPTY, jnp.int32)
        end = self._window_end(rows, rows.prompt_lengths, jnp.zeros_like(rows.length), knobs)
        return JacobiState(rows, cache, draft, end, pool, uniforms)

    def step(self, params: Any, state: JacobiState, knobs: JacobiKnobs) -> tuple[JacobiState, JacobiInfo]:
        """Verifies all candidates in one call, commits the longest agreement, keeps the rest as a draft."""
        before, at, width = state.rows, state.cached, self.width
        token, _ = before.newest
        # Verify: one call for all candidates; the longest agreement with the network's own predictions wins.
        call, positions = self._call(params, state, knobs)
        winner, accepted, tokens = call.winner, call.accepted, call.tokens
        # Commit what is accepted and the token after it.
        cache = self.network.write(state.cache, call.kv, write_after_read(at, tokens))
        rows = before.spend(call.counts, positions)
        rows = rows.commit(tokens, accepted + 1, call.log_probs)
        # Spawn and promote: the window's end moves on, what the winner predicts up to it is the new draft.
        agreed = newest_block_agreement(call.agrees, at, state.window_end, self.block)
        end = self._window_end(rows, state.window_end, agreed, knobs)
        known = jnp.minimum(state.window_end - before.length + 1, width) - (accepted + 1)
        fill = _fill_tokens(state.uniforms, rows.tokens, rows.length, width - 1)
        left = shift(tokens, accepted + 1)[:, :-1]
        draft = jnp.where(jnp.arange(width - 1) < known[:, None], left, fill)
        # Recycle: what was rejected may hold the right tokens at the wrong place.
        candidates = self._with_others(state.pool, rows, draft, call.after, known > 0)
        pool = recycling.push(state.pool, jnp.concatenate([token, tokens], axis=1))
        info = JacobiInfo(winner, accepted, rows.length - before.length)
        return JacobiState(rows, cache, candidates, end, pool, state.uniforms), info

    def drafts(self, state: JacobiState) -> Int[Array, "B drafts"]:
        """The draft of the W - 1 tokens after the committed ones, as far as the window goes."""
        position = state.rows.length[:, None] + jnp.arange(self.width - 1)
        return jnp.where(position < state.window_end[:, None], state.candidates[:, 0], -1)

    def _call(
        self, params: Any, state: JacobiState, knobs: JacobiKnobs
    ) -> tuple[JacobiCall, Int[Array, "B"]]:
        """The network on what is there, and the positions that each row has of it.

        A row has one candidate where all repeat its draft, and one block until another is spawned, unless there is
        a pool, which remembers predictions beyond the window's end as well.
        """
        counts: tuple[int, ...] = (1, self.num_candidates)
        widths: tuple[int, ...] = (self.width,)
        if self.blocks > 1 and self.pool == 0:
            widths = (self.block, self.width)
        drafts = state.candidates
        count = jnp.where(jnp.any(drafts != drafts[:, :1], axis=(1, 2)), counts[1], 1)
        width = jnp.where(state.window_end - state.cached <= widths[0], widths[0], widths[-1])
        if self.bounded:  # reverse mode would keep something of every shape
            call = self._verify(params, state, knobs, (counts[-1], widths[-1]))
        else:
            run = functools.partial(self._verify, params, state, knobs)
            call = on_smallest(run, counts, widths, count, width, ~state.rows.done)
        return call, count * width

    def _verify(self, params: Any, state: JacobiState, knobs: JacobiKnobs, shape: Shape) -> JacobiCall:
        """One call on the first candidates, cut to a width: which agrees longest, the first of equals."""
        (count, width), at, rows = shape, state.cached, state.rows
        # Assemble: the newest token and each candidate, side by side; all share the cache.
        drafts = state.candidates[:, :count, : width - 1]
        first = jnp.repeat(rows.newest[0][:, None], count, axis=1)
        fed, positions, mask = fold_candidates(jnp.concatenate([first, drafts], axis=2), at)
        out = self._at(self.recurrence).forward(params, fed, positions, Prefix(state.cache, at), mask)
        logits = self.network.logits(params, out.hidden)
        # Verify inside the window: the leading agreement of each.
        own = at[:, None] + 1 + jnp.arange(width)
        inside = own[:, :-1] < state.window_end[:, None]
        predicted = self.sample(logits, jnp.tile(own, (1, count)), rows, knobs)
        agrees = (drafts == predicted.reshape(len(at), count, width)[:, :, :-1]) & inside[:, None]
        matches = jax.vmap(select.leading_run)(agrees)
        winner, accepted = jnp.argmax(matches, axis=1), jnp.max(matches, axis=1)
        tokens = pick(predicted, winner, width)
        kv = out.kv if count == 1 else self.network.pick(out.kv, winner * width, width)
        after, log_probs = None, self.scores(pick(logits, winner, width), tokens)
        if self.num_candidates > 1:
            slot = winner * width + jnp.minimum(accepted + 1, width - 1)
            after = window(logits, slot, 1)[:, 0]
        return JacobiCall(
            winner=winner,
            accepted=accepted,
            tokens=pad_slots(tokens, self.width),
            agrees=pad_slots(
                jnp.take_along_axis(agrees, winner[:, None, None], axis=1)[:, 0], self.width - 1
            ),
            log_probs=None if log_probs is None else pad_slots(log_probs, self.width),
            after=after,
            kv=kv if width == self.width else self.network.widen(kv, self.width),
            counts=out.counts,
        )

    def _at(self, recurrence: int | None) -> Any:
        """The network at a depth."""
        return self.network if recurrence is None else self.network.at(recurrence)

    def _check(self) -> None:
        """Refuses depths that have no use, and more candidates than there are tokens."""
        vocab = self.network.vocab_size
        chosen = self.recurrence is not None or self.prefill_recurrence is not None
        if chosen and "recurrences" not in self.network.counters:
            raise ValueError("recurrence and prefill_recurrence are for networks of recurrent depth alone")
        if self.num_candidates > vocab:
            raise ValueError(
                f"candidates (1 + pool where it is None) must not exceed the {vocab} tokens of the vocabulary, "
                f"not {self.num_candidates}"
            )

    def _window_end(
        self, rows: Rows, old: Int[Array, "B"], agreed: Int[Array, "B"], knobs: JacobiKnobs
    ) -> Int[Array, "B"]:
        return window_end(
            rows.length,
            rows.prompt_lengths,
            old,
            agreed,
            SPAWN if knobs.spawn is None else knobs.spawn,
            block=self.block,
            blocks=self.blocks,
            running=self.running,
        )

    def _with_others(
        self,
        pool: Int[Array, "B G _"],
        rows: Rows,
        draft: Int[Array, "B drafts"],
        after: Float[Array, "B V"] | None,
        known: Bool[Array, "B"],
    ) -> Int[Array, "B R drafts"]:
        """The draft and its candidates: from the pool, then with the next-best first guess, where it is known."""
        others = self.num_candidates - 1
        if after is None:
            return draft[:, None]
        recycled, valid = recycling.recycled(pool, rows.newest[0][:, 0], draft)
        repairs = recycling.alternatives(after, draft, others)
        valid = jnp.concatenate([valid, jnp.broadcast_to(known[:, None], repairs.shape[:2])], axis=1)
        everything = jnp.concatenate([recycled, repairs], axis=1)
        chosen = recycling.distinct(draft, everything, valid, others)
        return jnp.concatenate([draft[:, None], chosen], axis=1)


def _fill_tokens(
    uniforms: Float[Array, "B S"], tokens: Int[Array, "B _"], lengths: Int[Array, "B"], count: int
) -> Int[Array, "B drafts"]:
    """Tokens for the `count` positions from `lengths` on, drawn uniformly from the row's tokens before them."""
    uniform = window(uniforms, lengths, count)
    drawn = jnp.floor(uniform * lengths[:, None]).astype(jnp.int32)
    return jnp.take_along_axis(tokens, drawn, axis=1)
