"""A call of the released multi-block decoders, one row at a time: its list of blocks and what each network call does.

The list holds every block of the call; `visible` of them count. A block is its accepted tokens and its draft,
together n tokens; a full one has `done == n`::

    index   0          1            2              3
            a a a a    a a d d      a q q q        q q q q
            decoded    real         pseudo         pseudo, spawned last

The functions are plain integer logic over arrays of fixed shapes; `OfficialMultiBlock` maps them over the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode import official_pool, stop
from paradec_jax.decode.official_blocks import verify
from paradec_jax.decode.official_pool import Pool
from paradec_jax.nn import masks

VARIANTS = ("main", "tail", "plain")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The state of a call.

    Attributes:
      rows: tokens of each block, accepted ones first, [C, R, n]. Rows behind the first are the candidates of the real
        block, or what a spawned block copied of them.
      count: rows of each block that count, [C].
      done: accepted tokens, [C].
      pseudo: still to be verified again, [C].
      listed, visible: list entries, and how many of them count.
      active: blocks that the program believes to be in flight.
      real: index of the block that is verified.
      known: the token behind its accepted ones.
      iterations: network calls done.
      pool: sequences for recycling.
    """

    rows: Int[Array, "C R n"]
    count: Int[Array, "C"]
    done: Int[Array, "C"]
    pseudo: Bool[Array, "C"]
    listed: Int[Array, ""]
    visible: Int[Array, ""]
    active: Int[Array, ""]
    real: Int[Array, ""]
    known: Int[Array, ""]
    iterations: Int[Array, ""]
    pool: Pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """What a network call is fed.

    Attributes:
      tokens: [R, W].
      rows, width: how much of it counts.
      start: accepted tokens of the real block, n where none of it is fed.
      slots: list indices of the pseudo blocks, C where there is none, [in flight - 1].
      line: the rows with the accepted tokens in front, [R, W].
    """

    tokens: Int[Array, "R W"]
    rows: Int[Array, ""]
    width: Int[Array, ""]
    start: Int[Array, ""]
    slots: Int[Array, "_"]
    line: Int[Array, "R W"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What became of the real block.

    Attributes:
      fed: whether any of it was fed.
      winner: the row that accepted most.
      tokens: accepted tokens, then the known next one, then the refreshed draft, [n + 1].
      count: accepted tokens.
    """

    fed: Bool[Array, ""]
    winner: Int[Array, ""]
    tokens: Int[Array, "_"]
    count: Int[Array, ""]


def rows_apart(rows: int, width: int) -> Bool[Array, "W W"]:
    """Several rows as one window: causal within a row, nothing of another (2 rows of 2 tokens drawn).

    ::

        x . . .
        x x . .
        . . x .
        . . x x
    """
    return masks.segments(jnp.repeat(jnp.arange(rows), width)[None])[0]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of a call, and its rules.

    Attributes:
      block: n.
      in_flight: blocks in the window.
      capacity: C, list entries.
      pool: G, sequences of the pool, 0 for none.
      variant: one of `VARIANTS`.
      pad: token that fills up a spawned block and never enters the pool.
    """

    block: int
    in_flight: int
    capacity: int
    pool: int
    variant: str
    pad: int

    @property
    def rows(self) -> int:
        """R, drafts side by side: the block's own and up to G - 1 candidates."""
        return max(self.pool, 1)

    @property
    def width(self) -> int:
        """W, positions of a row."""
        return self.in_flight * self.block

    def fresh(self, draft: Int[Array, "n"]) -> Blocks:
        """A call with one block and an empty pool."""
        slots, zero = jnp.zeros(self.capacity, jnp.int32), jnp.int32(0)
        rows = jnp.zeros((self.capacity, self.rows, self.block), jnp.int32)
        return Blocks(
            rows=rows.at[0].set(draft),
            count=slots + 1,
            done=slots,
            pseudo=jnp.zeros(self.capacity, bool),
            listed=zero + 1,
            visible=zero + 1,
            active=zero + 1,
            real=zero,
            known=draft[0],
            iterations=zero,
            pool=official_pool.empty(self.pool, (self.capacity + 1) * self.block),
        )

    def in_view(self, blocks: Blocks) -> Bool[Array, "C"]:
        """Pseudo blocks that count."""
        return blocks.pseudo & (jnp.arange(self.capacity) < blocks.visible)

    def view(self, blocks: Blocks) -> View:
        """The draft of the real block, then the pseudo blocks in the order of the list.

        A pseudo block has one row for all, unless it was spawned with as many as there are now.
        """
        start = blocks.done[blocks.real]
        left = self.block - start
        rows = jnp.where(left > 0, blocks.count[blocks.real], 1)
        ahead = self.in_flight - 1
        slots = jnp.nonzero(self.in_view(blocks), size=ahead, fill_value=self.capacity)[0]
        others = blocks.rows.at[slots].get(mode="fill", fill_value=0)
        own = blocks.count.at[slots].get(mode="fill", fill_value=1) == rows
        others = jnp.where(own[:, None, None], others, others[:, :1]).swapaxes(0, 1)
        line = jnp.concatenate(
            [blocks.rows[blocks.real], others.reshape(self.rows, ahead * self.block)], axis=1
        )
        line = jnp.where((jnp.arange(self.rows) < rows)[:, None], line, line[:1])
        tokens = stop.shift(line, jnp.broadcast_to(start, self.rows))
        width = left + self.block * jnp.sum(slots < self.capacity)
        return View(tokens, rows, width, start, slots, line)

    def in_line(self, predicted: Int[Array, "R W"], view: View) -> Int[Array, "R W"]:
        """Predictions in the slots of `view.line`."""
        room = jnp.concatenate([jnp.zeros_like(predicted), predicted], axis=1)
        return stop.window(room, jnp.broadcast_to(self.width - view.start, self.rows), self.width)

    def verify_real(
        self, blocks: Blocks, view: View, predicted: Int[Array, "R W"]
    ) -> tuple[Blocks, Verified]:
        """Verifies each row on its own; the one that accepts most wins, the first among equals."""
        n, real = self.block, blocks.real
        predicted = self.in_line(predicted, view)[:, :n]
        start, fed = jnp.broadcast_to(view.start, self.rows), view.start < n
        after, accepted = verify(view.line[:, :n], start, predicted)
        counts = jnp.arange(self.rows) < view.rows
        winner = jnp.argmax(jnp.where(counts, accepted, 0))
        block, done = after[winner], accepted[winner]
        known = jnp.where(fed, predicted[winner, done - 1], blocks.known)
        tokens = stop.shift(jnp.concatenate([block, known[None]])[None], view.start[None])[0]
        blocks = dataclasses.replace(
            blocks,
            rows=blocks.rows.at[real, 0].set(block),
            count=blocks.count.at[real].set(1),
            done=blocks.done.at[real].set(done),
            known=known,
            iterations=blocks.iterations + 1,
        )
        return blocks, Verified(fed, winner, tokens, done - view.start)

    def recycle(self, blocks: Blocks, real: Verified) -> Blocks:
        """Pushes what was rejected, and takes candidates for the next call out of the pool."""
        if not self.pool:
            return blocks
        n, at = self.block, blocks.real
        block, done = blocks.rows[at, 0], blocks.done[at]
        joined = blocks.rows[:, 0].reshape(-1)
        tail = jnp.arange(n) > done
        if self.variant == "main":
            seen = jnp.arange(self.capacity) < blocks.visible
            keep = jnp.repeat(seen, n)
        else:
            joined = jnp.concatenate([block, joined])
            keep = jnp.concatenate([tail, jnp.repeat(self.in_view(blocks), n)])
        pool = official_pool.push(blocks.pool, joined, keep & (joined != self.pad))
        pool = official_pool.push(pool, block, tail)
        rows, count = official_pool.candidates(pool, blocks.known, block, done)
        recycled = dataclasses.replace(
            blocks, rows=blocks.rows.at[at].set(rows), count=blocks.count.at[at].set(count), pool=pool
        )
        rejected = real.fed & (done < n)
        return jax.tree.map(lambda new, old: jnp.where(rejected, new, old), recycled, blocks)

    def refresh_pseudo(self, blocks: Blocks, view: View, predicted: Int[Array, "R W"]) -> Blocks:
        """Verifies the pseudo blocks with the predictions of row 0, whichever row won."""
        n, slots = self.block, view.slots
        predicted = self.in_line(predicted, view)[0, n:].reshape(-1, n)
        start = blocks.done.at[slots].get(mode="fill", fill_value=n)
        after, accepted = verify(view.line[0, n:].reshape(-1, n), start, predicted)
        return dataclasses.replace(
            blocks,
            rows=blocks.rows.at[slots, 0].set(after, mode="drop"),
            count=blocks.count.at[slots].set(1, mode="drop"),
            done=blocks.done.at[slots].set(accepted, mode="drop"),
        )

    def spawn(
        self, blocks: Blocks, spawn_at: Int[Array, ""], most: Int[Array, ""]
    ) -> tuple[Blocks, Bool[Array, ""]]:
        """Appends a pseudo block where the newest has come far enough: the real draft's rows, filled up."""
        at, n = blocks.listed, self.block
        draft = blocks.rows[blocks.real]
        start = blocks.done[blocks.real]
        shifted = stop.shift(draft, jnp.broadcast_to(start, self.rows))
        rows = jnp.where(jnp.arange(n) < n - start, shifted, self.pad)
        spawned = dataclasses.replace(
            blocks,
            rows=blocks.rows.at[at].set(rows, mode="drop"),
            count=blocks.count.at[at].set(jnp.where(start < n, blocks.count[blocks.real], 1), mode="drop"),
            done=blocks.done.at[at].set(0, mode="drop"),
            pseudo=blocks.pseudo.at[at].set(True, mode="drop"),
            listed=blocks.listed + 1,
            visible=blocks.visible + 1,
            active=blocks.active + 1,
        )
        wanted = (blocks.done[blocks.visible - 1] >= spawn_at) & (blocks.active < most)
        ahead, _ = self.promote(spawned)  # which comes next
        fits = (at < self.capacity) & (jnp.sum(self.in_view(ahead)) < self.in_flight)
        did = wanted & fits
        return jax.tree.map(lambda new, old: jnp.where(did, new, old), spawned, blocks), did

    def promote(self, blocks: Blocks) -> tuple[Blocks, Int[Array, ""]]:
        """Where the real block is full, the first pseudo block that has begun takes its place.

        Its first token becomes the known one. Every block that is passed on the way lowers the count of active ones.
        """
        ready = self.in_view(blocks) & (blocks.done > 0)
        found, at = jnp.any(ready), jnp.argmax(ready)
        rows = blocks.rows.at[at, 0, 0].set(blocks.known)
        promoted = dataclasses.replace(
            blocks,
            rows=rows,
            count=blocks.count.at[at].set(1),
            done=blocks.done.at[at].set(0),
            pseudo=blocks.pseudo.at[at].set(False),
            visible=blocks.visible - (self.variant == "main"),
            active=blocks.active - at - 1,
            real=at,
        )
        passed = dataclasses.replace(blocks, active=blocks.active - blocks.visible)
        full = blocks.done[blocks.real] >= self.block
        new = jax.tree.map(lambda yes, no: jnp.where(found, yes, no), promoted, passed)
        moved = jax.tree.map(lambda yes, no: jnp.where(full, yes, no), new, blocks)
        return moved, jnp.where(full & found, at, -1)

    def over(self, blocks: Blocks) -> Bool[Array, ""]:
        """Whether all blocks that count are full, or nothing is left to feed."""
        counts = jnp.arange(self.capacity) < blocks.visible
        full = jnp.all((blocks.done >= self.block) | ~counts)
        idle = (blocks.done[blocks.real] >= self.block) & ~jnp.any(self.in_view(blocks))
        return full | idle
