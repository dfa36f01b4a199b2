"""A canvas: positions shown in any order, until each row is complete.

::

    position    0 1 2 3 4 5 6 7 | 8 9        `limit` = 8
    tokens      a b _ d _ _ g _ | . .        given or revealed, _ the mask
    shown       x x . x . . x . |            length = 2: the sealed ones, a leading run of them

What is shown may be hidden again as long as it is not sealed; what is sealed never changes.

A row's canvas is what lies below its `limit`; the rest of the buffer is invisible to it. A canvas
of whole blocks goes on to the end of the block that holds the last of these positions: the network
sees whole blocks, the row ends at its limit. Blocks count from position 0 or from the end of the
row's prompt, which is one block or, as if it had been padded on the left, several::

    origin "start"     p p p p | p _ _ _ | _ _ _ _          B = 4, a prompt of 5
    origin "prompt"    p p p p p | _ _ _ _ | _ _ _ _
    origin "padded"    p | p p p p | _ _ _ _ | _ _ _ _
"""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine import Counts, Rows
from paradec_jax.decode.rules import put, shift, window
from paradec_jax.records import pytree, static


@pytree
class Choice:
    """What a step does to a window, or to each of R windows.

    Attributes:
      where: positions that it reveals, [B, W].
      tokens: token drawn for every position, [B, W]; only those of revealed positions count.
      scores: confidence c of each token, [B, W].
      log_probs: log-probability of each token, [B, W], where the decoder keeps them.
    """

    where: Bool[Array, "B *R W"]
    tokens: Int[Array, "B *R W"]
    scores: Float[Array, "B *R W"]
    log_probs: Float[Array, "B *R W"] | None

    def only(self, rows: Bool[Array, "B"]) -> "Choice":
        """The same choice, which reveals nothing in the other rows."""
        return dataclasses.replace(self, where=self.where & rows[:, None])


@pytree
class Canvas:
    """The state of decoders of canvases, or its base: streaming, stop strings and the queue read
    `rows`, as everywhere.

    Attributes:
      rows: tokens (the mask's id where none is shown), lengths, counts.
      shown: positions whose token was given or revealed, [B, S].
      block: B, positions of a block.
      origin: where blocks count from, "start" (position 0), "prompt" (the prompt's end) or "padded"
        (the prompt's end, in both directions).
      whole: whether the canvas ends with a whole block, not at the row's limit.
    """

    rows: Rows
    shown: Bool[Array, "B S"]
    block: int = static()
    origin: str = static()
    whole: bool = static()

    @classmethod
    def of(
        cls, rows: Rows, mask: int, block: int = 1, origin: str = "start", whole: bool = True
    ) -> "Canvas":
        """The canvas of fresh rows: given tokens are shown, `mask` stands everywhere else."""
        shown = jnp.arange(rows.tokens.shape[1]) < rows.length[:, None]
        if rows.fixed is not None:
            shown |= rows.fixed
        tokens = jnp.where(shown, rows.tokens, mask)
        return cls(dataclasses.replace(rows, tokens=tokens), shown, block, origin, whole)

    @property
    def drafts(self) -> Int[Array, "B S"]:
        """Shown tokens from each row's `length` on, -1 where none is: what its position's
        neighbours see already.
        """
        within = jnp.arange(self.shown.shape[1]) < self.rows.limit[:, None]
        known = jnp.where(self.shown & within, self.rows.tokens, -1)
        return shift(known + 1, self.rows.length) - 1

    @property
    def given(self) -> Bool[Array, "B S"]:
        """Positions whose token was given."""
        if self.rows.fixed is not None:
            return self.rows.fixed
        return jnp.arange(self.shown.shape[1]) < self.rows.prompt_lengths[:, None]

    @property
    def unsealed(self) -> Bool[Array, "B S"]:
        """Positions whose token was revealed and may still change."""
        sealed = jnp.arange(self.shown.shape[1]) < self.rows.length[:, None]
        return self.shown & ~sealed & ~self.given

    @property
    def first(self) -> Int[Array, "B"] | int:
        """Position of each row's first block, which may follow a group of another length."""
        if self.origin == "padded":
            return self.rows.prompt_lengths % self.block
        return self.rows.prompt_lengths if self.origin == "prompt" else 0

    def block_at(self, position: Int[Array, "B"]) -> Int[Array, "B"]:
        """First position of the block that holds each row's `position`."""
        return self.first + (position - self.first) // self.block * self.block

    @property
    def inside(self) -> Bool[Array, "B S"]:
        """Positions of each row's canvas."""
        end = self.rows.limit
        if self.whole:
            end = self.block_at(end + self.block - 1)
        return jnp.arange(self.shown.shape[1]) < end[:, None]

    @property
    def open(self) -> Bool[Array, "B S"]:
        """Positions that are still to be revealed; none of a row that has stopped."""
        return self.inside & ~self.shown & ~self.rows.done[:, None]

    def window(self, at: Int[Array, "B"], width: int) -> tuple[Array, Array, Array, Array]:
        """A window of the canvas, for a call of the network.

        Returns:
          Tokens [B, W], positions [B, W], which are open [B, W], and a mask [B, W, W] by which
          every query sees all positions of the canvas in the window.
        """
        positions = at[:, None] + jnp.arange(width)
        inside = window(self.inside, at, width)
        mask = jnp.broadcast_to(inside[:, None], (*positions.shape, width))
        return window(self.rows.tokens, at, width), positions, window(self.open, at, width), mask

    def show(
        self: "AnyCanvas",
        tokens: Int[Array, "B W"],
        where: Bool[Array, "B W"],
        at: Int[Array, "B"],
        log_probs: Float[Array, "B W"] | None = None,
    ) -> "AnyCanvas":
        """Shows tokens at open positions `at + i`, in any order; what is shown already keeps its
        token.
        """
        where = where & window(self.open, at, tokens.shape[1])
        rows = self.rows.write(tokens, where, at, log_probs)
        shown = put(self.shown, jnp.ones_like(where), at, where)
        return dataclasses.replace(self, rows=rows, shown=shown)

    def hide(
        self: "AnyCanvas", where: Bool[Array, "B W"], at: Int[Array, "B"], mask: int
    ) -> "AnyCanvas":
        """Puts `mask` back at positions `at + i` that are neither sealed nor given."""
        positions = at[:, None] + jnp.arange(where.shape[1])
        where = where & (positions >= self.rows.length[:, None])
        rows = self.rows.write(jnp.full_like(positions, mask), where, at)
        return dataclasses.replace(self, rows=rows, shown=self.shown & (rows.tokens != mask))

    def seal(self: "AnyCanvas", upto: Int[Array, "B"] | None = None) -> "AnyCanvas":
        """Commits the leading run of what is shown, as far as position `upto`.

        Budget and stop tokens cut the run as `Rows.settle` says.
        """
        shown = self.shown
        if upto is not None:
            shown &= jnp.arange(shown.shape[1]) < upto[:, None]
        return dataclasses.replace(self, rows=self.rows.settle(shown))

    def spend(
        self: "AnyCanvas", counts: Counts, positions: Array | int, calls: Array | int = 1
    ) -> "AnyCanvas":
        """Adds to the counts of running rows, as `Rows.spend`."""
        return dataclasses.replace(self, rows=self.rows.spend(counts, positions, calls))


AnyCanvas = TypeVar("AnyCanvas", bound=Canvas)
