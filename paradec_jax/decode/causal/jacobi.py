"""Jacobi decoding of causal models: draft a window, compare it with the network's own predictions,
keep what agrees; the predictions after it are the next draft.

::

    fed          x  d1 d2 d3 d4      x the newest committed token, d the draft after it
    predictions  g0 g1 g2 g3 g4      d1 = g0, d2 = g1, d3 != g2: m = 2 drafts are accepted
    committed    g0 g1 g2            m + 1 tokens; g3 g4 begin the next draft

The output is that of autoregressive decoding (`machine/verify.py`; Santilli et al. 2023; Jacobi
Forcing).

With several blocks, drafts reach beyond the block that is verified (Jacobi Forcing, Algorithm 1; K
= 3, n = 4)::

    position     s               s + 4           s + 8           s + 12
    window       [ a  a  x  d    | p  p  p  p    |  not spawned ]
                   real-active     pseudo        ^ window_end
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import MOST, check_number
from paradec_jax.decode.causal.recycling import EMPTY, recycle
from paradec_jax.decode.machine import (
    SHARE,
    CachedState,
    DecoderBase,
    Number,
    RepetitionKnobs,
    Request,
    Rows,
    knob,
)
from paradec_jax.decode.machine.verify import counted, verify
from paradec_jax.decode.rules import Purpose, select, shift, uniform, window
from paradec_jax.records import choices, pytree


@pytree
class JacobiKnobs(RepetitionKnobs):
    """Sampling, and when a block is spawned.

    Attributes:
      spawn: r, share of the newest block that must agree with its prediction before the next block
        is spawned; at 0 all blocks are in flight from the start. None is 0.5 (the paper: 0.85), and
        the only choice with one block.
    """

    spawn: Number | None = knob(None, SHARE, unset=0.5, needs=("blocks", 2))


@pytree
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


@pytree
class JacobiInfo:
    """The winning candidate of a call (0 for the draft), its m tokens that agree, and tokens
    committed, [B] each.
    """

    winner: Int[Array, "B"]
    accepted: Int[Array, "B"]
    committed: Int[Array, "B"]


@choices
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

    block: int = 16
    blocks: int = 1
    running: bool = False
    pool: int = 0
    candidates: int | None = None
    recurrence: int | None = None
    prefill_recurrence: int | None = None
    Knobs = JacobiKnobs

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
        return self.candidates or 1 + self.pool

    def init(self, params: Any, request: Request, knobs: JacobiKnobs) -> JacobiState:
        """Reads each prompt and W - 1 random tokens after it in one call: the first token, the
        first iterate.
        """
        uniforms = uniform(request.keys, Purpose.FILLER, self.limits()[0] + self.width)
        draft = self._fill(uniforms, request.tokens, request.lengths)
        reader = self.prefill_recurrence and self.network.at(self.prefill_recurrence)
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
        before, end = state.rows, state.window_end

        # Verify: the candidate whose guesses agree longest wins, and m of them are accepted.
        # One block is enough until another is spawned, but a pool remembers the whole width.
        widths = () if self.pool else (self.block,)
        won = verify(self, params, state, state.candidates, end - before.length, knobs, widths)

        # Commit them and the token after them, which follows from them.
        count = won.accepted + 1
        rows = won.rows.commit(won.tokens, count, won.log_probs)

        # Spawn a block where the newest one agrees on a share r; promote the next one where the
        # window has reached it.
        new_end = self.next_end(rows, state.cached, end, won.agrees, knobs.spawn)

        # Refresh: what the winner predicts up to the old end is the draft; what nothing predicts
        # yet is random.
        known = (end - before.length - won.accepted)[:, None]
        predicted = shift(won.tokens, count, self.width - 1)
        fill = self._fill(state.uniforms, rows.tokens, rows.length)
        draft = jnp.where(jnp.arange(self.width - 1) < known, predicted, fill)

        # Recycle: candidates come out of the iterates of earlier calls, and this one joins them.
        drafts = recycle(draft, state.pool, rows.newest[0], won.after, known, self.num_candidates)
        iterate = jnp.concatenate([before.newest[0], won.tokens], axis=1)
        pool = jnp.concatenate([iterate[:, None], state.pool], axis=1)[:, : self.pool]
        info = JacobiInfo(won.winner, won.accepted, rows.length - before.length)
        return JacobiState(rows, won.cache, drafts, new_end, pool, state.uniforms), info

    def drafts(self, state: JacobiState) -> Int[Array, "B drafts"]:
        """The draft of the W - 1 tokens after the committed ones, as far as the window goes."""
        return counted(state.candidates[:, 0], state.window_end - state.rows.length)

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
