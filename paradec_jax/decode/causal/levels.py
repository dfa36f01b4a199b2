"""The window of lookahead decoding (arXiv 2402.02057): levels of past Jacobi iterations.

A window begins with level 0 alone, of C = W + N - 2 columns. A call adds a level and takes a
column, until N - 1 levels have W columns; from then on levels move up (N = 4, W = 2, C = 4)::

    filled = 0         1             2              2, full: levels move up
    t a a a            t a a         t a            t b
                       b b b         b b            c c
                                     c c            d d
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.nn import masks
from paradec_jax.records import pytree


@pytree
class Levels:
    """The window of each row; what lies beyond its levels and columns is meaningless.

    Attributes:
      tokens: tokens by level and column, of which the first is the newest committed one, [B, N - 1,
        C].
      filled: levels beside level 0, N - 2 when the window is full, [B].
    """

    tokens: Int[Array, "B levels columns"]
    filled: Int[Array, "B"]

    @property
    def width(self) -> Int[Array, "B"]:
        """Columns that a level has now."""
        return self.tokens.shape[2] - self.filled

    @property
    def full(self) -> Bool[Array, "B"]:
        """Whether all N - 1 levels are there."""
        return self.filled == self.tokens.shape[1] - 1

    def beside(
        self, guesses: Int[Array, "B G m"]
    ) -> tuple[Int[Array, "B W"], Int[Array, "B W"], Bool[Array, "B W W"]]:
        """A call on the window and guesses after it: the token of each slot, 0 where there is none;
        how far it stands after the newest token; what it sees.
        """
        batch, levels, columns = self.tokens.shape
        slots = max((s + 1) * (columns - s) for s in range(1, levels))  # of the largest window
        # Those after the last level mean nothing.
        level, column = jnp.divmod(jnp.arange(slots), self.width[:, None])
        index = jnp.minimum(level, levels - 1) * columns + column
        tokens = jnp.take_along_axis(self.tokens.reshape(batch, -1), index, axis=1)
        # None stands further than those that mean something.
        ahead = jnp.minimum(level + column, columns - 1)
        _, count, length = guesses.shape
        places = jnp.broadcast_to(jnp.arange(1, length + 1), guesses.shape)
        fed = jnp.concatenate([tokens, jnp.maximum(guesses, 0).reshape(batch, -1)], axis=1)
        ahead = jnp.concatenate([ahead, places.reshape(batch, -1)], axis=1)
        return fed, ahead, masks.lookahead(level, column, count, length)

    def advance(self, fresh: Int[Array, "B columns"], token: Int[Array, "B 1"]) -> "Levels":
        """The window one position on: a full one moves its levels up, another one gets a level.

        Args:
          fresh: the new level, the token after each item of the newest one.
          token: the newest committed token.
        """
        levels = self.tokens.shape[1]
        up = jnp.concatenate([self.tokens[:, 1:], fresh[:, None]], axis=1)
        added = self.filled[:, None] + 1 == jnp.arange(levels)
        left = jnp.roll(jnp.where(added[..., None], fresh[:, None], self.tokens), -1, axis=2)
        tokens = jnp.where(self.full[:, None, None], up, left).at[:, 0, 0].set(token[:, 0])
        return Levels(tokens, jnp.minimum(self.filled + 1, levels - 1))
