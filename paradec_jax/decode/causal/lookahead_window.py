"""The window of lookahead decoding: levels of Jacobi iterations, and the flat slots in which a call is fed them.

A window begins with level 0 alone, of C = W + N - 2 columns. A call adds a level and takes a column, until N - 1
levels have W columns; from then on levels move up (N = 4, W = 2, C = 4)::

    filled = 0         1             2              2, full: levels move up
    t a a a            t a a         t a            t b
                       b b b         b b            c c
                                     c c            d d

`t` is the newest committed token. A level at `level` and a column at `column` stand `level + column` positions after
it. A call is fed the window row by row: slot = level (C - filled) + column; slots after the last level mean nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from paradec_jax.decode.rules.windows import window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Levels:
    """The window of each row; what lies beyond its levels and columns is meaningless.

    Attributes:
      tokens: its first token is the newest committed one, [B, N - 1, C].
      filled: levels beside level 0, N - 2 when the window is full, [B].
    """

    tokens: Int[Array, "B levels columns"]
    filled: Int[Array, "B"]

    @property
    def columns(self) -> int:
        """C, columns of level 0 before the first call."""
        return self.tokens.shape[2]

    @property
    def slots(self) -> int:
        """Slots of the largest window that a call is fed."""
        return max((s + 1) * (self.columns - s) for s in range(1, self.tokens.shape[1]))

    @property
    def width(self) -> Int[Array, "B"]:
        """Columns that a level has now."""
        return self.columns - self.filled

    @property
    def size(self) -> Int[Array, "B"]:
        """Slots that the window takes now."""
        return (self.filled + 1) * self.width

    @property
    def full(self) -> Bool[Array, "B"]:
        """Whether all N - 1 levels are there."""
        return self.filled == self.tokens.shape[1] - 1

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """Level 0 after the newest token, -1 in columns that the window no longer has."""
        return jnp.where(jnp.arange(self.columns) < self.width[:, None], self.tokens[:, 0], -1)[:, 1:]

    def places(self) -> tuple[Int[Array, "B slots"], Int[Array, "B slots"]]:
        """Level and column of each slot."""
        return jnp.divmod(jnp.arange(self.slots), self.width[:, None])

    def flat(self) -> Int[Array, "B slots"]:
        """The token of each slot."""
        level, column = self.places()
        batch, levels, columns = self.tokens.shape
        index = jnp.minimum(level, levels - 1) * columns + column
        return jnp.take_along_axis(self.tokens.reshape(batch, -1), index, axis=1)

    def ahead(self) -> Int[Array, "B slots"]:
        """How far each slot stands after the newest token; no slot is further than those that mean something."""
        level, column = self.places()
        return jnp.minimum(level + column, self.columns - 1)

    def newest(self, x: Shaped[Array, "B W *rest"]) -> Shaped[Array, "B columns *rest"]:
        """What belongs to the newest level, of an array over all slots of a call; the first `width` count."""
        return window(x, self.filled * self.width, self.columns)

    def ngrams(self, fresh: Int[Array, "B columns"], count: int) -> Int[Array, "B W n"]:
        """The n-grams of a full window's `count` columns, each ended by the new level."""
        return jnp.concatenate([self.tokens, fresh[:, None]], axis=1)[..., :count].swapaxes(1, 2)

    def advance(self, fresh: Int[Array, "B columns"], token: Int[Array, "B"]) -> "Levels":
        """The window one position on: a full one moves its levels up, another one gets a level.

        Args:
          fresh: the new level, the token after each item of the newest one.
          token: the newest committed token.
        """
        levels = self.tokens.shape[1]
        up = jnp.concatenate([self.tokens[:, 1:], fresh[:, None]], axis=1)
        added = self.filled[:, None] + 1 == jnp.arange(levels)
        left = jnp.roll(jnp.where(added[..., None], fresh[:, None], self.tokens), -1, axis=2)
        tokens = jnp.where(self.full[:, None, None], up, left).at[:, 0, 0].set(token)
        return Levels(tokens, jnp.minimum(self.filled + 1, levels - 1))


def begin(ahead: Int[Array, "B _"], fresh: Int[Array, "B columns"], token: Int[Array, "B"], n: int) -> Levels:
    """The window after the prompt's call.

    Args:
      ahead: level 0 without its first token.
      fresh: level 1 as the call gave it.
      token: the first committed token.
      n: N.
    """
    batch, columns = fresh.shape
    tokens = jnp.zeros((batch, n - 1, columns), jnp.int32).at[:, 0, 1:].set(ahead)
    return Levels(tokens, jnp.zeros_like(token)).advance(fresh, token)
