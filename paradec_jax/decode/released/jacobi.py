"""Block Jacobi decoding as the released program runs it (Jacobi Forcing; its predecessor CLLM), greedy.

A draft of n tokens is fed behind the committed ones; the leading tokens that the network repeats are committed,
its predictions are the new draft of the rest. The draft shrinks until the block is done::

    position    length ...                     committed after the call
    call        d d d d d d d d                d d d
                      g g g g g                      g g g g
                              g                              g

`jacobi` holds the clean rule; this one repeats the program, see `OfficialJacobi`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode import stop
from paradec_jax.decode.base import after, where_rows
from paradec_jax.decode.official_blocks import BlockDecoder, BlockKnobs, until_stop, verify
from paradec_jax.decode.protocol import Decoded, Progress, Request


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiPass:
    """What one network call of a row was fed and what became of it.

    Attributes:
      running: whether the row ran, [B]; otherwise the rest means nothing.
      call: block call it belongs to, [B].
      before, after: the iterate before and after, accepted tokens first, [B, n]. `before[start:]` was fed.
      start, accepted: accepted tokens of the block before and after, [B].
      predicted: argmax at each token that was fed, from slot `start` on, [B, n].
      cached: tokens before the window, [B].
      committed: tokens appended, [B].
      known: the token behind the accepted ones, [B].
    """

    running: Bool[Array, "B"]
    call: Int[Array, "B"]
    before: Int[Array, "B n"]
    after: Int[Array, "B n"]
    start: Int[Array, "B"]
    accepted: Int[Array, "B"]
    predicted: Int[Array, "B n"]
    cached: Int[Array, "B"]
    committed: Int[Array, "B"]
    known: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiState:
    """Rows, cache, the block in work and the last network call.

    Attributes:
      progress, cache: the rows; the cache holds every committed token.
      block: accepted tokens and draft, [B, n].
      accepted: accepted tokens of it, [B].
      call: block calls begun before, [B].
      passed: the last network call; before the first, `running` is False.
    """

    progress: Progress
    cache: Any
    block: Int[Array, "B n"]
    accepted: Int[Array, "B"]
    call: Int[Array, "B"]
    passed: JacobiPass


@dataclasses.dataclass(frozen=True)
class OfficialJacobi(BlockDecoder):
    """The released block decoder; a step is one network call. It keeps what the program does:

    - the prefill reads n random prompt tokens too, and what it predicts is the first draft;
    - the window shrinks to what is left of the block (here it keeps its width, and columns behind it do nothing);
    - a stop token that follows a full block goes unnoticed, and the next call spends a network call to find it;
    - the budget is looked at between blocks, so up to n - 1 tokens more are committed and stay in the result.

    Attributes:
      complete_blocks: as the program that collects trajectories: a block always completes its n tokens, behind
        a stop token too, and a row ends with the block that holds one, or that goes *beyond* the budget.
        `trajectories` has the record function and takes the records apart.
    """

    _: dataclasses.KW_ONLY
    complete_blocks: bool = False

    def init(self, params: Any, request: Request, knobs: BlockKnobs) -> JacobiState:
        """Reads the prompt; the predictions behind it are the first draft."""
        progress, cache, predicted = self.read(params, request, knobs, 2 * self.block, self.block)
        block, zeros = self.first_draft(progress, predicted), jnp.zeros_like(request.lengths)
        none = jnp.zeros(request.batch, bool)
        passed = JacobiPass(none, zeros, block, block, zeros, zeros, predicted, zeros, zeros, zeros)
        return JacobiState(progress, cache, block, zeros, zeros, passed)

    def step(self, params: Any, state: JacobiState, knobs: BlockKnobs) -> JacobiState:
        """Feeds the draft, commits the tokens that agree, and begins a new block where this one is done."""
        n, start, before = self.block, state.accepted, state.progress
        predicted, cache = self._feed(params, state)
        block, accepted = verify(state.block, start, predicted)
        known = jnp.take_along_axis(predicted, accepted[:, None] - 1, axis=1)[:, 0]
        full = accepted == n

        # The window tested for stop tokens holds the known next one too, unless the block is full.
        tokens, count = stop.shift(block, start), accepted - start
        stopped = jnp.zeros_like(full)
        if not self.complete_blocks:
            first, stopped = until_stop(before, tokens, count + ~full)
            count = jnp.where(stopped, first, count)
        progress = stop.extend(before.count(1, n - start, 1), tokens, count)
        used_up = progress.length >= progress.limit
        if self.complete_blocks:
            written = jnp.arange(progress.tokens.shape[1])
            written = (written >= progress.prompt_lengths[:, None]) & (written < progress.length[:, None])
            stopped = full & jnp.any(stop.is_stop(progress.tokens, progress.stop) & written, axis=1)
            used_up = progress.length > progress.limit
        call = state.call + full
        progress = self.reason(progress, stopped, full, used_up, call, knobs)
        passed = JacobiPass(
            running=~before.done,
            call=state.call,
            before=state.block,
            after=block,
            start=start,
            accepted=accepted,
            predicted=predicted,
            cached=before.length,
            committed=progress.length - before.length,
            known=known,
        )
        fresh = self.next_draft(progress, known, call)
        block, accepted = where_rows(full, (fresh, jnp.zeros_like(accepted)), (block, accepted))
        old = (state.block, state.accepted, state.call)
        block, accepted, call = where_rows(~before.done, (block, accepted, call), old)
        return JacobiState(progress, cache, block, accepted, call, passed)

    def _feed(self, params: Any, state: JacobiState) -> tuple[Int[Array, "B n"], Any]:
        """Predictions in the block's own slots, and the cache with the window stored behind the committed tokens."""
        n, at = self.block, state.progress.length
        tokens, positions = stop.shift(state.block, state.accepted), at[:, None] + jnp.arange(n)
        latent = stop.window(state.progress.initial, at, n)
        out = self.network.forward(params, tokens, positions, state.cache, at, latent)
        predicted = self.predict(params, out.hidden)
        cache = self.network.write(state.cache, out.kv, after(at, predicted))
        room = jnp.concatenate([jnp.zeros_like(predicted), predicted], axis=1)
        return stop.window(room, n - state.accepted, n), cache

    def finish(self, state: JacobiState) -> Decoded:
        """All committed tokens, those beyond the budget included."""
        return stop.finish(state.progress, self.size + self.block, self.pad)
