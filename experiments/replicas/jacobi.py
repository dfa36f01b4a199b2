"""Block Jacobi decoding as the released program runs it (Jacobi Forcing; its predecessor CLLM),
greedy.

A draft of n tokens is fed after the committed ones; the leading tokens that the network repeats are
committed, its predictions are the new draft of the rest. The draft shrinks until the block is
done::

    position       length ...                     committed after the network call
    network call   d d d d d d d d                d d d
                         g g g g g                      g g g g
                                 g                              g

`causal.jacobi` holds the clean rule; this one repeats the program, see `ReleasedJacobi`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.replicas import blocks
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows, is_stop
from paradec_jax.decode.rules.windows import shift, where_rows, window, write_after_read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedJacobiInfo:
    """What a network call of each row was fed and what became of it.

    Attributes:
      running: whether the row ran, [B]; otherwise the rest means nothing.
      block_call: block call it belongs to, [B].
      before, after: the iterate before and after, accepted tokens first, [B, n]. `before[start:]`
        was fed.
      start, accepted: accepted tokens of the block before and after, [B].
      predicted: argmax at each token that was fed, from slot `start` on, [B, n].
      cached: tokens before the window, [B].
      committed: tokens appended, [B].
      known: the token after the accepted ones, [B].
    """

    running: Bool[Array, "B"]
    block_call: Int[Array, "B"]
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
class ReleasedJacobiState:
    """Rows, cache, and the block in work.

    Attributes:
      rows, cache: the rows; the cache holds every committed token.
      block: accepted tokens and draft, [B, n].
      accepted: accepted tokens of it, [B].
      block_call: block calls begun before, [B].
    """

    rows: Rows
    cache: Any
    block: Int[Array, "B n"]
    accepted: Int[Array, "B"]
    block_call: Int[Array, "B"]

    @property
    def cached(self) -> Int[Array, "B"]:
        """Trusted cache entries."""
        return self.rows.length


@dataclasses.dataclass(frozen=True)
class ReleasedJacobi(DecoderBase):
    """The released block decoder; a step is one network call. It keeps what the program does:

    - the prefill reads n random prompt tokens too, and what it predicts is the first draft;
    - the window shrinks to what is left of the block (here it keeps its width, and columns after it
      do nothing);
    - a stop token that follows a full block goes unnoticed, and the next block call spends a
      network call to find it;
    - the budget is looked at between blocks, so up to n - 1 tokens more are committed and stay in
      the result.

    A row of n' new tokens ends within 1 + n' + 2 n network calls.

    Attributes:
      block: n, tokens of a block.
      complete_blocks: as the program that collects trajectories: a block always completes its n
        tokens, after a stop token too, and a row ends with the block that holds one, or that goes
        *beyond* the budget. `trajectories` takes the infos of a trace apart.
      greedy: always; the program takes sampling arguments and ignores them, here they are refused.
    """

    _: dataclasses.KW_ONLY
    block: int = 64
    complete_blocks: bool = False
    greedy: bool = True

    def __post_init__(self) -> None:
        blocks.check_settings(self)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> ReleasedJacobiState:
        """Reads the prompt; the predictions from its last token on are the first draft."""
        del knobs
        rows, cache, predicted = blocks.read(
            self, params, request, 2 * self.block, overrun=self.block
        )
        zeros = jnp.zeros_like(request.lengths)
        return ReleasedJacobiState(rows, cache, blocks.first_draft(rows, predicted), zeros, zeros)

    def step(
        self, params: Any, state: ReleasedJacobiState, knobs: SamplingKnobs
    ) -> tuple[ReleasedJacobiState, ReleasedJacobiInfo]:
        """Feeds the draft, commits the tokens that agree, and begins a new block where this one is
        done.
        """
        n, start, before = self.block, state.accepted, state.rows
        rows, cache, predicted = self._feed(params, state)
        block, accepted = blocks.verify(state.block, start, predicted)
        known = jnp.take_along_axis(predicted, accepted[:, None] - 1, axis=1)[:, 0]
        full = accepted == n

        # The window tested for stop tokens holds the known next one too, unless the block is full.
        tokens, count = shift(block, start), accepted - start
        stopped = jnp.zeros_like(full)
        if not self.complete_blocks:
            first, stopped = blocks.until_stop(before, tokens, count + ~full)
            count = jnp.where(stopped, first, count)
        rows = blocks.extend(rows, tokens, count)
        used_up = rows.length >= rows.limit
        if self.complete_blocks:
            written = jnp.arange(rows.tokens.shape[1])
            written = (written >= rows.prompt_lengths[:, None]) & (written < rows.length[:, None])
            stopped = full & jnp.any(is_stop(rows.tokens, rows.stop) & written, axis=1)
            used_up = rows.length > rows.limit
        block_call = state.block_call + full
        rows = blocks.reasoned(rows, stopped, full, used_up, block_call)
        info = ReleasedJacobiInfo(
            running=~before.done,
            block_call=state.block_call,
            before=state.block,
            after=block,
            start=start,
            accepted=accepted,
            predicted=predicted,
            cached=state.cached,
            committed=rows.length - before.length,
            known=known,
        )
        fresh = blocks.next_draft(rows, known, block_call, n)
        block, accepted = where_rows(full, (fresh, jnp.zeros_like(accepted)), (block, accepted))
        old = (state.block, state.accepted, state.block_call)
        block, accepted, block_call = where_rows(~before.done, (block, accepted, block_call), old)
        return ReleasedJacobiState(rows, cache, block, accepted, block_call), info

    def drafts(self, state: ReleasedJacobiState) -> Int[Array, "B n"]:
        """The block's draft."""
        left = jnp.arange(self.block) < self.block - state.accepted[:, None]
        return jnp.where(left, shift(state.block, state.accepted), -1)

    def _feed(self, params: Any, state: ReleasedJacobiState) -> tuple[Rows, Any, Int[Array, "B n"]]:
        """Rows that paid, the cache with the draft in it, and what each slot of the block predicts."""
        n, at = self.block, state.cached
        tokens, positions = shift(state.block, state.accepted), at[:, None] + jnp.arange(n)
        out = self.network.forward(params, tokens, positions, Prefix(state.cache, at))
        predicted = blocks.predict(self, params, out.hidden)
        cache = self.network.write(state.cache, out.kv, write_after_read(at, predicted))
        room = jnp.concatenate([jnp.zeros_like(predicted), predicted], axis=1)
        rows = state.rows.spend(out.counts, n - state.accepted)
        return rows, cache, window(room, n - state.accepted, n)
