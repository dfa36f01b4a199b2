"""Multi-block Jacobi decoding with rejection recycling as the released programs run it, greedy.

After the draft of the *real* block, which is verified and committed, lie *pseudo* blocks, drafted
ahead and never committed. Candidates come out of the pool; the one that accepts most wins::

    position      length ...
    candidate 0   d d d d d | a a a q q q q q | q q q q q q q q      d draft, a pseudo-accepted, q pseudo draft
    candidate 1   c c c c c | a a a q q q q q | q q q q q q q q      c out of the pool
    candidate 2   c c c c c | a a a q q q q q | q q q q q q q q

All of them go through the network in one call, as one window in which a candidate sees only itself
and the shared prefix. Where no running row has a candidate out of the pool, or none a pseudo block,
the call leaves them out. `causal.jacobi` holds the clean rule; this one repeats the programs, see
`ReleasedMultiBlock`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.replicas import blocks
from experiments.replicas.block_call import VARIANTS, BlockCall, BlockCallRules, Fed
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import COUNT, SHARE, SamplingKnobs, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree
from paradec_jax.decode.rules.windows import pad_slots, where_rows, write_after_read

CAPACITY = 129  # list entries of a block call, of which a network call spawns one at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedMultiBlockKnobs(SamplingKnobs):
    """When blocks are spawned, and how long a block call goes on. The sampling knobs keep their
    defaults.

    Attributes:
      blocks: K, most blocks that count as active. The programs lose count, see
        `ReleasedMultiBlock`.
      spawn_ratio: r; a block is spawned when the newest one has accepted ceil(r n) tokens.
      max_iterations: network calls of a block call at most.
    """

    blocks: Int[Array, ""] | int = knob(2, COUNT)
    spawn_ratio: Float[Array, ""] | float = knob(0.85, SHARE)
    max_iterations: Int[Array, ""] | int = knob(128, COUNT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedMultiBlockInfo:
    """What a network call of each row was fed and what became of it.

    Attributes:
      running: whether the row ran, [B]; otherwise the rest means nothing.
      block_call: block call it belongs to, [B].
      tokens, predicted: candidates that were fed, and the argmax at each token, [B, R, W].
      count, width: how much of them counts, [B].
      cached: tokens before the window, [B].
      committed: tokens appended, [B].
      known: the token after the accepted ones, [B].
      spawned: whether a block was spawned, [B].
      promoted: index of the block that became the real one, or -1, [B].
    """

    running: Bool[Array, "B"]
    block_call: Int[Array, "B"]
    tokens: Int[Array, "B R W"]
    predicted: Int[Array, "B R W"]
    count: Int[Array, "B"]
    width: Int[Array, "B"]
    cached: Int[Array, "B"]
    committed: Int[Array, "B"]
    known: Int[Array, "B"]
    spawned: Bool[Array, "B"]
    promoted: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedMultiBlockState:
    """Rows, cache (all committed tokens), the present block call of each row, and block calls
    before it, [B].
    """

    rows: Rows
    cache: Any
    present: BlockCall
    block_call: Int[Array, "B"]

    @property
    def cached(self) -> Int[Array, "B"]:
        """Trusted cache entries."""
        return self.rows.length


@dataclasses.dataclass(frozen=True)
class ReleasedMultiBlock(DecoderBase):
    """The released multi-block decoders; a step is one network call. They keep what the programs
    do:

    - "main" (released): the promotion of a block hides the newest one from the block call's list.
      With two blocks the block call ends there, and the promoted block and its draft are lost; all
      that is left of it is what went into the pool. The block call after a jump to a full block
      spends a network call that commits nothing.
    - "tail" and "plain" (development branch, with and without a pool): the promoted block is
      decoded on. Each promotion lowers the count of active blocks once for every block it passes,
      so more than K come to be in flight.
    - Pseudo blocks are refreshed from candidate 0 whoever won, and their first token counts as
      accepted.
    - Candidates need two sequences of the pool beside the newest, so a pool of fewer than 3 does
      nothing.
    - Stop tokens are tested in the real block alone, and budgets between block calls, so the result
      may overrun them.

    The programs grow their lists without bound. Here a block is spawned only where list
    (`CAPACITY`) and window (`in_flight`) have room, and a block call is broken off once it lies a
    block beyond `size`; where these are large enough the result is theirs. Where "main" fails on a
    stale pseudo draft (it has another number of candidates), here its own draft goes with every
    candidate.

    A row ends within 1 + `blocks.MAX_BLOCK_CALLS` `max_iterations` network calls.

    Attributes:
      block: n, tokens of a block.
      variant: one of `VARIANTS`.
      pool: G, sequences of the pool; the variant "plain" has none.
      in_flight: blocks that the compiled window holds, the real one included.
      greedy: always; the programs take sampling arguments and ignore them, here they are refused.
    """

    _: dataclasses.KW_ONLY
    block: int = 64
    variant: str = "main"
    pool: int = 4
    in_flight: int = 2
    greedy: bool = True
    Knobs: ClassVar[type] = ReleasedMultiBlockKnobs

    def __post_init__(self) -> None:
        blocks.check_settings(self)
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {self.variant!r}")
        for name, least in (("pool", 0), ("in_flight", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def rules(self) -> BlockCallRules:
        """Sizes of the arrays of a block call, and what is done with them."""
        pool = self.pool if self.variant != "plain" and self.pool > 2 else 0
        capacity = 1 if self.in_flight == 1 else CAPACITY
        return BlockCallRules(
            self.block, self.in_flight, capacity, pool, self.variant, self.spec.pad
        )

    def init(
        self, params: Any, request: Request, knobs: ReleasedMultiBlockKnobs
    ) -> ReleasedMultiBlockState:
        """Reads the prompt; the predictions from its last token on are the first draft."""
        del knobs
        rules, n = self.rules, self.block
        rows, cache, predicted = blocks.read(
            self, params, request, 2 * n + rules.width + 1, overrun=2 * n
        )
        present = jax.vmap(rules.fresh)(blocks.first_draft(rows, predicted))
        return ReleasedMultiBlockState(rows, cache, present, jnp.zeros_like(request.lengths))

    def step(
        self, params: Any, state: ReleasedMultiBlockState, knobs: ReleasedMultiBlockKnobs
    ) -> tuple[ReleasedMultiBlockState, ReleasedMultiBlockInfo]:
        """Feeds all blocks, verifies and commits the real one, refreshes the others, spawns and
        promotes.
        """
        before, rules = state.rows, self.rules
        fed = jax.vmap(rules.feed)(state.present)
        predicted, won, counts = self._feed(params, state, fed)
        present, real = jax.vmap(rules.verify_real)(state.present, fed, predicted)
        cache = self.network.write(
            state.cache, won, write_after_read(state.cached, predicted[:, 0])
        )

        first, stopped = blocks.until_stop(
            before, real.tokens, jnp.where(real.fed, real.count + 1, 0)
        )
        count = jnp.where(stopped, first, real.count)
        rows = blocks.extend(before.spend(counts, fed.count * fed.width), real.tokens, count)

        present, spawned, promoted = self._ahead(present, fed, real, predicted, knobs)
        over = jax.vmap(rules.over)(present) | (present.iterations >= knobs.max_iterations)
        broken_off = rows.length >= self.size + self.block
        block_call = state.block_call + over
        used_up = broken_off | (rows.length >= rows.limit)
        rows = blocks.reasoned(rows, stopped, over | broken_off, used_up, block_call)
        info = ReleasedMultiBlockInfo(
            running=~before.done,
            block_call=state.block_call,
            tokens=fed.tokens,
            predicted=predicted,
            count=fed.count,
            width=fed.width,
            cached=state.cached,
            committed=rows.length - before.length,
            known=present.known,
            spawned=spawned & ~stopped,
            promoted=jnp.where(stopped, -1, promoted),
        )
        fresh = jax.vmap(rules.fresh)(
            blocks.next_draft(rows, present.known, block_call, self.block)
        )
        present = where_rows(over, fresh, present)
        old = (state.present, state.block_call)
        present, block_call = where_rows(~before.done, (present, block_call), old)
        return ReleasedMultiBlockState(rows, cache, present, block_call), info

    def drafts(self, state: ReleasedMultiBlockState) -> Int[Array, "B W"]:
        """The draft of the real block and the pseudo blocks after it."""
        fed = jax.vmap(self.rules.feed)(state.present)
        there = jnp.arange(self.rules.width) < fed.width[:, None]
        return jnp.where(there, fed.tokens[:, 0], -1)

    def _feed(
        self, params: Any, state: ReleasedMultiBlockState, fed: Fed
    ) -> tuple[Int[Array, "B R W"], Any, dict[str, Any]]:
        """One network call for the candidates that count: each causal in itself, after the same
        prefix.

        Returns:
          The prediction at each token, zeros where nothing was fed, keys and values of the winner's
          real block, and what the call cost.
        """
        rules, at = self.rules, state.cached

        def read(hidden: Array) -> Reading:
            predicted = pad_slots(blocks.predict(self, params, hidden), *fed.tokens.shape[1:])
            winner = jax.vmap(rules.verify_real)(state.present, fed, predicted)[1].winner
            return Reading(rest=predicted, kept=winner)

        call = forward_tree(
            self.network,
            params,
            Prefix(state.cache, at),
            Windows.star(fed.tokens, at, fed.count * ~state.rows.done),
            read,
            width=fed.width,
            widths=(self.block,),
        )
        return call.rest, self.network.pick(call.kv, jnp.zeros_like(at), self.block), call.counts

    def _ahead(
        self, present: BlockCall, fed: Any, real: Any, predicted: Int[Array, "B R W"], knobs: Any
    ) -> tuple[BlockCall, Bool[Array, "B"], Int[Array, "B"]]:
        """Recycles, refreshes pseudo blocks, spawns and promotes; whether one was spawned, which
        was promoted.
        """
        rules, batch = self.rules, predicted.shape[0]
        # 0.85 * 20 is 17, whatever the rounding
        spawn_at = jnp.ceil(knobs.spawn_ratio * self.block - 1e-4)
        spawn_at, most = (
            jnp.broadcast_to(x, batch).astype(jnp.int32) for x in (spawn_at, knobs.blocks)
        )
        present = jax.vmap(rules.recycle)(present, real)
        present = jax.vmap(rules.refresh_pseudo)(present, fed, predicted)
        present, spawned = jax.vmap(rules.spawn)(present, spawn_at, most)
        present, promoted = jax.vmap(rules.promote)(present)
        return present, spawned, promoted
