"""States of an open block that are drafted before a call verifies them.

::

    canvas C_1   _ b _ _
    draft 1      . . c .       C_2   _ b c _
    draft 2      a . . d       C_3   a b c d
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.block.head import HeadCanvas
from paradec_jax.decode.canvas import Choice
from paradec_jax.decode.rules import window
from paradec_jax.records import pytree


@pytree
class Candidates:
    """States C_1 .. C_K of each row's open block: the canvas, then each with one draft more.

    Attributes:
      tokens: what stands in the block, [B, K, W].
      masked: positions that are still to be revealed, [B, K, W].
      exists: states that are there, [B, K].
      reads: states that the call reads, [B, K]; none of a row that has stopped.
      complete: the one without masks that it reads, [B, K]; none in most rows.
    """

    tokens: Int[Array, "B K W"]
    masked: Bool[Array, "B K W"]
    exists: Bool[Array, "B K"]
    reads: Bool[Array, "B K"]
    complete: Bool[Array, "B K"]


@pytree
class DraftedCanvas(HeadCanvas):
    """A canvas of blocks, and guesses of the next steps in the open one.

    Attributes:
      where: positions that each draft reveals, none where there is no draft, [B, K - 1, W].
      tokens: tokens that it reveals there, [B, K - 1, W].
    """

    where: Bool[Array, "B drafts W"]
    tokens: Int[Array, "B drafts W"]

    @classmethod
    def empty(cls, canvas: HeadCanvas, count: int) -> "DraftedCanvas":
        """A canvas with room for so many drafts, and none in it."""
        nothing = jnp.zeros((len(canvas.cached), count, canvas.block), jnp.int32)
        return cls(**vars(canvas), where=nothing > 0, tokens=nothing)

    @property
    def drafts(self) -> Int[Array, "B S"]:
        """Tokens revealed after a gap or drafted for the next call, from `length` on; -1 else."""
        guessed, where = self.candidates(ride=False).tokens[:, -1], jnp.any(self.where, axis=1)
        return super(DraftedCanvas, self.show(guessed, where, self.cached)).drafts

    def candidates(self, ride: bool) -> Candidates:
        """The states that drafts make; `ride` reads a complete draft where a block follows."""
        running, drafted = ~self.rows.done[:, None], jnp.any(self.where, axis=2)
        exists = jnp.concatenate([jnp.ones_like(running), drafted], axis=1)
        tokens, masked = [self.text], [window(self.open, self.cached, self.block)]
        for draft in range(self.where.shape[1]):
            where = self.where[:, draft]
            tokens.append(jnp.where(where, self.tokens[:, draft], tokens[-1]))
            masked.append(masked[-1] & ~where)
        left = jnp.stack(masked, axis=1) & exists[:, :, None]
        # A complete canvas is read in any case, to be stored.
        goes_on = ride & window(self.inside, self.cached + self.block, self.block)[:, :1]
        carries = jnp.concatenate([running, drafted & goes_on & running], axis=1)
        some = jnp.any(left, axis=2)
        complete = carries & ~some
        return Candidates(jnp.stack(tokens, axis=1), left, exists, some | complete, complete)

    def with_drafts(self, drafts: list[Choice]) -> "DraftedCanvas":
        """The canvas with new drafts."""
        together = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *drafts)
        return dataclasses.replace(self, where=together.where, tokens=together.tokens)


def merged(choices: Choice, made: Bool[Array, "B K W"]) -> Choice:
    """One choice for K of them, of which no two reveal the same position."""
    source = jnp.argmax(made, axis=1)[:, None]
    at_source = jax.tree.map(lambda x: jnp.take_along_axis(x, source, axis=1)[:, 0], choices)
    return dataclasses.replace(at_source, where=jnp.any(made, axis=1))
