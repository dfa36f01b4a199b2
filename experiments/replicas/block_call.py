"""A block call of the released multi-block decoders, one row at a time, and what each network call
does to it.

Its list holds every block; `visible` of them count. A block is its accepted tokens and its draft,
together n tokens; a full one has `done == n`::

    index   0          1            2              3
            a a a a    a a d d      a q q q        q q q q
            decoded    real         pseudo         pseudo, spawned last

The functions are plain integer logic over arrays of fixed shapes; `ReleasedMultiBlock` maps them
over the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.replicas import pool as pools
from experiments.replicas.blocks import verify
from experiments.replicas.pool import Pool
from paradec_jax.decode.rules.windows import shift, window

VARIANTS = ("main", "tail", "plain")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCall:
    """The state of a block call: a list of C blocks, each with up to R candidates.

    Attributes:
      tokens: candidates of each block, accepted tokens first, [C, R, n]. The first is the block's
        own; those after it come out of the pool (real block), or were copied when the block was
        spawned.
      count: candidates of each block that count, [C].
      done: accepted tokens, [C].
      pseudo: still to be verified again, [C].
      listed, visible: list entries, and how many of them count.
      active: blocks that the program believes to be in flight.
      real: index of the block that is verified.
      known: the token after its accepted ones.
      iterations: network calls done.
      pool: sequences for recycling.
    """

    tokens: Int[Array, "C R n"]
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
class Fed:
    """What a network call is fed.

    Attributes:
      tokens: candidates, each a draft of the real block and all pseudo blocks, [R, W].
      count, width: how much of it counts.
      start: accepted tokens of the real block, n where none of it is fed.
      slots: list indices of the pseudo blocks, C where there is none, [in flight - 1].
      line: the candidates with the accepted tokens before them, [R, W].
    """

    tokens: Int[Array, "R W"]
    count: Int[Array, ""]
    width: Int[Array, ""]
    start: Int[Array, ""]
    slots: Int[Array, "_"]
    line: Int[Array, "R W"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accepted:
    """What became of the real block.

    Attributes:
      fed: whether any of it was fed.
      winner: the candidate that accepted most.
      tokens: accepted tokens, then the known next one, then the refreshed draft, [n + 1].
      count: accepted tokens.
    """

    fed: Bool[Array, ""]
    winner: Int[Array, ""]
    tokens: Int[Array, "_"]
    count: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class BlockCallRules:
    """Static sizes of a block call, and its rules.

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
    def candidates(self) -> int:
        """R, drafts side by side: the block's own and up to G - 1 out of the pool."""
        return max(self.pool, 1)

    @property
    def width(self) -> int:
        """W, positions of a candidate."""
        return self.in_flight * self.block

    def fresh(self, draft: Int[Array, "n"]) -> BlockCall:
        """A block call with one block and an empty pool."""
        slots, zero = jnp.zeros(self.capacity, jnp.int32), jnp.int32(0)
        tokens = jnp.zeros((self.capacity, self.candidates, self.block), jnp.int32)
        return BlockCall(
            tokens=tokens.at[0].set(draft),
            count=slots + 1,
            done=slots,
            pseudo=jnp.zeros(self.capacity, bool),
            listed=zero + 1,
            visible=zero + 1,
            active=zero + 1,
            real=zero,
            known=draft[0],
            iterations=zero,
            pool=pools.empty(self.pool, (self.capacity + 1) * self.block),
        )

    def pseudo_blocks(self, state: BlockCall) -> Bool[Array, "C"]:
        """Pseudo blocks that count."""
        return state.pseudo & (jnp.arange(self.capacity) < state.visible)

    def feed(self, state: BlockCall) -> Fed:
        """The draft of the real block, then the pseudo blocks in the order of the list.

        A pseudo block has one draft for all candidates, unless it was spawned with as many as there
        are now.
        """
        start = state.done[state.real]
        left = self.block - start
        count = jnp.where(left > 0, state.count[state.real], 1)
        ahead = self.in_flight - 1
        slots = jnp.nonzero(self.pseudo_blocks(state), size=ahead, fill_value=self.capacity)[0]
        others = state.tokens.at[slots].get(mode="fill", fill_value=0)
        own = state.count.at[slots].get(mode="fill", fill_value=1) == count
        others = jnp.where(own[:, None, None], others, others[:, :1]).swapaxes(0, 1)
        others = others.reshape(self.candidates, ahead * self.block)
        line = jnp.concatenate([state.tokens[state.real], others], axis=1)
        line = jnp.where((jnp.arange(self.candidates) < count)[:, None], line, line[:1])
        tokens = shift(line, jnp.broadcast_to(start, self.candidates))
        width = left + self.block * jnp.sum(slots < self.capacity)
        return Fed(tokens, count, width, start, slots, line)

    def in_line(self, predicted: Int[Array, "R W"], fed: Fed) -> Int[Array, "R W"]:
        """Predictions in the slots of `fed.line`."""
        room = jnp.concatenate([jnp.zeros_like(predicted), predicted], axis=1)
        return window(room, jnp.broadcast_to(self.width - fed.start, self.candidates), self.width)

    def verify_real(
        self, state: BlockCall, fed: Fed, predicted: Int[Array, "R W"]
    ) -> tuple[BlockCall, Accepted]:
        """Verifies each candidate on its own; the one that accepts most wins, the first among
        equals.
        """
        n, real = self.block, state.real
        predicted = self.in_line(predicted, fed)[:, :n]
        start, any_fed = jnp.broadcast_to(fed.start, self.candidates), fed.start < n
        after, accepted = verify(fed.line[:, :n], start, predicted)
        counts = jnp.arange(self.candidates) < fed.count
        winner = jnp.argmax(jnp.where(counts, accepted, 0))
        block, done = after[winner], accepted[winner]
        known = jnp.where(any_fed, predicted[winner, done - 1], state.known)
        tokens = shift(jnp.concatenate([block, known[None]])[None], fed.start[None])[0]
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[real, 0].set(block),
            count=state.count.at[real].set(1),
            done=state.done.at[real].set(done),
            known=known,
            iterations=state.iterations + 1,
        )
        return state, Accepted(any_fed, winner, tokens, done - fed.start)

    def recycle(self, state: BlockCall, real: Accepted) -> BlockCall:
        """Pushes what was rejected, and takes candidates for the next network call out of the pool."""
        if not self.pool:
            return state
        n, at = self.block, state.real
        block, done = state.tokens[at, 0], state.done[at]
        joined = state.tokens[:, 0].reshape(-1)
        tail = jnp.arange(n) > done
        if self.variant == "main":
            seen = jnp.arange(self.capacity) < state.visible
            keep = jnp.repeat(seen, n)
        else:
            joined = jnp.concatenate([block, joined])
            keep = jnp.concatenate([tail, jnp.repeat(self.pseudo_blocks(state), n)])
        pool = pools.push(state.pool, joined, keep & (joined != self.pad))
        pool = pools.push(pool, block, tail)
        tokens, count = pools.candidates(pool, state.known, block, done)
        recycled = dataclasses.replace(
            state,
            tokens=state.tokens.at[at].set(tokens),
            count=state.count.at[at].set(count),
            pool=pool,
        )
        rejected = real.fed & (done < n)
        return jax.tree.map(lambda new, old: jnp.where(rejected, new, old), recycled, state)

    def refresh_pseudo(self, state: BlockCall, fed: Fed, predicted: Int[Array, "R W"]) -> BlockCall:
        """Verifies the pseudo blocks with the predictions of candidate 0, whichever won."""
        n, slots = self.block, fed.slots
        predicted = self.in_line(predicted, fed)[0, n:].reshape(-1, n)
        start = state.done.at[slots].get(mode="fill", fill_value=n)
        after, accepted = verify(fed.line[0, n:].reshape(-1, n), start, predicted)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, 0].set(after, mode="drop"),
            count=state.count.at[slots].set(1, mode="drop"),
            done=state.done.at[slots].set(accepted, mode="drop"),
        )

    def spawn(
        self, state: BlockCall, spawn_at: Int[Array, ""], most: Int[Array, ""]
    ) -> tuple[BlockCall, Bool[Array, ""]]:
        """Appends a pseudo block where the newest has come far enough: the real draft's candidates,
        filled up.
        """
        at, n = state.listed, self.block
        draft = state.tokens[state.real]
        start = state.done[state.real]
        shifted = shift(draft, jnp.broadcast_to(start, self.candidates))
        tokens = jnp.where(jnp.arange(n) < n - start, shifted, self.pad)
        count = jnp.where(start < n, state.count[state.real], 1)
        spawned = dataclasses.replace(
            state,
            tokens=state.tokens.at[at].set(tokens, mode="drop"),
            count=state.count.at[at].set(count, mode="drop"),
            done=state.done.at[at].set(0, mode="drop"),
            pseudo=state.pseudo.at[at].set(True, mode="drop"),
            listed=state.listed + 1,
            visible=state.visible + 1,
            active=state.active + 1,
        )
        wanted = (state.done[state.visible - 1] >= spawn_at) & (state.active < most)
        ahead, _ = self.promote(spawned)  # which comes next
        fits = (at < self.capacity) & (jnp.sum(self.pseudo_blocks(ahead)) < self.in_flight)
        did = wanted & fits
        return jax.tree.map(lambda new, old: jnp.where(did, new, old), spawned, state), did

    def promote(self, state: BlockCall) -> tuple[BlockCall, Int[Array, ""]]:
        """Where the real block is full, the first pseudo block that has begun takes its place.

        Its first token becomes the known one. Every block that is passed on the way lowers the
        count of active ones.
        """
        ready = self.pseudo_blocks(state) & (state.done > 0)
        found, at = jnp.any(ready), jnp.argmax(ready)
        promoted = dataclasses.replace(
            state,
            tokens=state.tokens.at[at, 0, 0].set(state.known),
            count=state.count.at[at].set(1),
            done=state.done.at[at].set(0),
            pseudo=state.pseudo.at[at].set(False),
            visible=state.visible - (self.variant == "main"),
            active=state.active - at - 1,
            real=at,
        )
        passed = dataclasses.replace(state, active=state.active - state.visible)
        full = state.done[state.real] >= self.block
        new = jax.tree.map(lambda yes, no: jnp.where(found, yes, no), promoted, passed)
        moved = jax.tree.map(lambda yes, no: jnp.where(full, yes, no), new, state)
        return moved, jnp.where(full & found, at, -1)

    def over(self, state: BlockCall) -> Bool[Array, ""]:
        """Whether all blocks that count are full, or nothing is left to feed."""
        counts = jnp.arange(self.capacity) < state.visible
        full = jnp.all((state.done >= self.block) | ~counts)
        idle = (state.done[state.real] >= self.block) & ~jnp.any(self.pseudo_blocks(state))
        return full | idle
