"""Multi-block Jacobi decoding with rejection recycling as the released programs run it, greedy.

Behind the draft of the *real* block, which is verified and committed, lie *pseudo* blocks, drafted ahead and never
committed. Candidates out of the pool are rows of their own; the row that accepts most wins::

    position   length ...
    row 0      d d d d d | a a a q q q q q | q q q q q q q q      d draft, a pseudo-accepted, q pseudo draft
    row 1      c c c c c | a a a q q q q q | q q q q q q q q      c candidate
    row 2      c c c c c | a a a q q q q q | q q q q q q q q

All rows go through the network in one call, as one window in which a row sees only itself and the shared prefix.
`multiblock` holds the clean rule; this one repeats the programs, see `OfficialMultiBlock`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import official_calls as calls
from paradec_jax.decode import stop
from paradec_jax.decode.base import after, where_rows
from paradec_jax.decode.official_blocks import BlockDecoder, BlockKnobs, until_stop
from paradec_jax.decode.official_calls import VARIANTS, Blocks, Shape
from paradec_jax.decode.protocol import Decoded, Progress, Request
from paradec_jax.decode.sampling import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiBlockKnobs(BlockKnobs):
    """When blocks are spawned, and how long a call goes on.

    Attributes:
      blocks: K, most blocks that count as active. The programs lose count, see `OfficialMultiBlock`.
      spawn_ratio: r; a block is spawned when the newest one has accepted ceil(r n) tokens.
      max_iterations: network calls of a block call at most.
    """

    blocks: Int[Array, "..."] | int = 2
    spawn_ratio: Float[Array, "..."] | float = 0.85
    max_iterations: Int[Array, "..."] | int = 128

    def checked(self) -> "MultiBlockKnobs":
        """Self, after a look at the values that are not traced. Raises ValueError."""
        super().checked()
        check(self.blocks, "blocks", lambda x: x >= 1, "at least 1")
        check(self.spawn_ratio, "spawn_ratio", lambda x: (x >= 0) & (x <= 1), "between 0 and 1")
        check(self.max_iterations, "max_iterations", lambda x: x >= 1, "at least 1")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiBlockPass:
    """What one network call of a row was fed and what became of it.

    Attributes:
      running: whether the row ran, [B]; otherwise the rest means nothing.
      call: block call it belongs to, [B].
      tokens, predicted: rows that were fed, and the argmax at each token, [B, R, W].
      rows, width: how much of them counts, [B].
      cached: tokens before the window, [B].
      committed: tokens appended, [B].
      known: the token behind the accepted ones, [B].
      spawned: whether a block was spawned, [B].
      promoted: index of the block that became the real one, or -1, [B].
    """

    running: Bool[Array, "B"]
    call: Int[Array, "B"]
    tokens: Int[Array, "B R W"]
    predicted: Int[Array, "B R W"]
    rows: Int[Array, "B"]
    width: Int[Array, "B"]
    cached: Int[Array, "B"]
    committed: Int[Array, "B"]
    known: Int[Array, "B"]
    spawned: Bool[Array, "B"]
    promoted: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiBlockState:
    """Rows, cache (all committed tokens), blocks and pool of the present call, calls before it, the last pass."""

    progress: Progress
    cache: Any
    blocks: Blocks
    call: Int[Array, "B"]
    passed: MultiBlockPass


@dataclasses.dataclass(frozen=True)
class OfficialMultiBlock(BlockDecoder):
    """The released multi-block decoders; a step is one network call. They keep what the programs do:

    - "main" (released): the promotion of a block hides the newest one from the call's list. With two blocks the
      call ends there, and the promoted block and its draft are lost; all that is left of it is what went into
      the pool. The call after a jump to a full block spends a network call that commits nothing.
    - "tail" and "plain" (development branch, with and without a pool): the promoted block is decoded on. Each
      promotion lowers the count of active blocks once for every block it passes, so more than K come to be in flight.
    - Pseudo blocks are refreshed from row 0 whoever won, and their first token counts as accepted.
    - Candidates need two sequences of the pool beside the newest, so a pool of fewer than 3 does nothing.
    - Stop tokens are tested in the real block alone, and budgets between calls, so the result may overrun them.

    The programs grow their lists without bound. Here a block is spawned only where list (`capacity`) and window
    (`in_flight`) have room, and a call is broken off once it lies a block beyond `size`; choose them large enough and
    the result is theirs. Where "main" fails on a stale pseudo draft (its number of rows is not that of the
    candidates), here its row 0 goes with every candidate.

    Attributes:
      variant: one of `VARIANTS`.
      pool: G, sequences of the pool; the variant "plain" has none.
      in_flight: blocks that the compiled window holds, the real one included.
      capacity: list entries of a call; a network call spawns one at most.
    """

    _: dataclasses.KW_ONLY
    variant: str = "main"
    pool: int = 4
    in_flight: int = 2
    capacity: int = 129
    Knobs: ClassVar[type] = MultiBlockKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {self.variant!r}")
        for name, least in (("pool", 0), ("in_flight", 1), ("capacity", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def shape(self) -> Shape:
        """Sizes of the arrays of a call."""
        pool = self.pool if self.variant != "plain" and self.pool > 2 else 0
        capacity = 1 if self.in_flight == 1 else self.capacity
        return Shape(self.block, self.in_flight, capacity, pool, self.variant, self.pad)

    def init(self, params: Any, request: Request, knobs: MultiBlockKnobs) -> MultiBlockState:
        """Reads the prompt; the predictions behind it are the first draft."""
        shape, n = self.shape, self.block
        progress, cache, predicted = self.read(params, request, knobs, 2 * n + shape.width + 1, n)
        blocks = jax.vmap(shape.fresh)(self.first_draft(progress, predicted))
        zeros, no = jnp.zeros_like(request.lengths), jnp.zeros(request.batch, bool)
        fed = jnp.zeros((request.batch, shape.rows, shape.width), jnp.int32)
        passed = MultiBlockPass(no, zeros, fed, fed, zeros, zeros, zeros, zeros, zeros, no, zeros - 1)
        return MultiBlockState(progress, cache, blocks, zeros, passed)

    def step(self, params: Any, state: MultiBlockState, knobs: MultiBlockKnobs) -> MultiBlockState:
        """Feeds all blocks, verifies and commits the real one, refreshes the others, spawns and promotes."""
        before, shape = state.progress, self.shape
        batch = before.length.shape[0]
        view = jax.vmap(shape.view)(state.blocks)
        out = self._feed(params, state, view.tokens)
        predicted = self.predict(params, out.hidden).reshape(view.tokens.shape)
        blocks, real = jax.vmap(shape.verify_real)(state.blocks, view, predicted)
        window = self.network.pick(out.kv, real.winner * shape.width, self.block)
        cache = self.network.write(state.cache, window, after(before.length, predicted[:, 0]))

        count = real.count
        first, stopped = until_stop(before, real.tokens, jnp.where(real.fed, count + 1, 0))
        count = jnp.where(stopped, first, count)
        progress = stop.extend(before.count(1, view.rows * view.width, 1), real.tokens, count)

        spawn_at = jnp.ceil(knobs.spawn_ratio * self.block - 1e-4)  # 0.85 * 20 is 17, whatever the rounding
        spawn_at, most = (jnp.broadcast_to(x, batch).astype(jnp.int32) for x in (spawn_at, knobs.blocks))
        blocks = jax.vmap(shape.recycle)(blocks, real)
        blocks = jax.vmap(shape.refresh_pseudo)(blocks, view, predicted)
        blocks, spawned = jax.vmap(shape.spawn)(blocks, spawn_at, most)
        blocks, promoted = jax.vmap(shape.promote)(blocks)
        over = jax.vmap(shape.over)(blocks) | (blocks.iterations >= knobs.max_iterations)
        broken_off = progress.length >= self.size + self.block
        call = state.call + over
        used_up = broken_off | (progress.length >= progress.limit)
        progress = self.reason(progress, stopped, over | broken_off, used_up, call, knobs)
        passed = MultiBlockPass(
            running=~before.done,
            call=state.call,
            tokens=view.tokens,
            predicted=predicted,
            rows=view.rows,
            width=view.width,
            cached=before.length,
            committed=progress.length - before.length,
            known=blocks.known,
            spawned=spawned & ~stopped,
            promoted=jnp.where(stopped, -1, promoted),
        )
        fresh = jax.vmap(shape.fresh)(self.next_draft(progress, blocks.known, call))
        blocks = where_rows(over, fresh, blocks)
        blocks, call = where_rows(~before.done, (blocks, call), (state.blocks, state.call))
        return MultiBlockState(progress, cache, blocks, call, passed)

    def _feed(self, params: Any, state: MultiBlockState, tokens: Int[Array, "B R W"]) -> Any:
        """One call for all rows: R windows of W positions, each causal in itself, behind the same prefix."""
        batch, rows, width = tokens.shape
        at = state.progress.length
        ahead = jnp.tile(jnp.arange(width), rows)
        latent = jnp.tile(stop.window(state.progress.initial, at, width), (1, rows, 1))
        return self.network.forward(
            params,
            tokens.reshape(batch, rows * width),
            at[:, None] + ahead,
            state.cache,
            at,
            latent,
            window_mask=calls.rows_apart(rows, width),
        )

    def finish(self, state: MultiBlockState) -> Decoded:
        """All committed tokens, those beyond the budget included."""
        return stop.finish(state.progress, self.size + 2 * self.block, self.pad)
