"""Named visibility rules: which keys a query may see (True = visible).

A window of W queries looks at two groups of keys: a cached prefix and the window itself. Each rule
below is drawn with queries as rows and keys as columns.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

BlockLength = int | Int[Array, ""] | Int[Array, "B"]


def causal(width: int) -> Bool[Array, "W W"]:
    """A position of the window sees itself and the earlier ones.

    ::

        x . . .
        x x . .
        x x x .
        x x x x
    """
    return jnp.tril(jnp.ones((width, width), dtype=bool))


def segments(of: Int[Array, "B W"]) -> Bool[Array, "B W W"]:
    """Packed rows: causal within a segment, and no segment sees another (segments 1, 1, 2, 2
    drawn).

    ::

        x . . .
        x x . .
        . . x .
        . . x x
    """
    return (of[:, :, None] == of[:, None]) & causal(of.shape[1])


def block_causal(
    positions: Int[Array, "B W"], block: BlockLength, origin: BlockLength = 0
) -> Bool[Array, "B W W"]:
    """A position sees its block whole and the blocks before it (blocks of 2, positions 0 to 4
    drawn).

    ::

        x x . . .
        x x . . .
        x x x x .
        x x x x .
        x x x x x

    Args:
      positions: absolute, so a window may begin inside a block.
      block: tokens of a block, of all rows or of each.
      origin: position that blocks count from, of all rows or of each; those before it are one
        group.
    """
    of = jnp.maximum(block_of(positions - jnp.reshape(origin, (-1, 1)), block), -1)
    return of[:, :, None] >= of[:, None]


def block_diagonal(positions: Int[Array, "B W"], block: BlockLength) -> Bool[Array, "B W W"]:
    """A position sees its own block alone, whole: the noisy stream of block diffusion (drawn as
    `block_causal`).

    ::

        x x . . .
        x x . . .
        . . x x .
        . . x x .
        . . . . x
    """
    of = block_of(positions, block)
    return of[:, :, None] == of[:, None]


def strictly_before(positions: Int[Array, "B W"], block: BlockLength) -> Bool[Array, "B W W"]:
    """A position sees the blocks before its own: what a noisy stream sees of the clean one (drawn
    as `block_causal`).

    ::

        . . . . .
        . . . . .
        x x . . .
        x x . . .
        x x x x .
    """
    of = block_of(positions, block)
    return of[:, :, None] > of[:, None]


def block_of(positions: Int[Array, "B W"], block: BlockLength) -> Int[Array, "B W"]:
    """The number of each position's block."""
    return positions // jnp.reshape(jnp.asarray(block), (-1, 1))


def windows(
    sizes: Sequence[int], sees: Int[Array, "*B R R"], causal: bool | Bool[Array, "... W"]
) -> Bool[Array, "... W W"]:
    """Windows side by side: each sees itself, and the first rows of others (of 3, 1 and 2 positions
    drawn; the second sees two rows of the first, the third one).

    ::

        x x x . . .
        x x x . . .
        x x x . . .
        x x . x . .
        x . . . x x
        x . . . x x

    Args:
      sizes: positions of each of R windows, W together.
      sees: rows of each other one that each window sees.
      causal: no position of a window sees a later one of it; of each position whether it does not.
    """
    index = np.repeat(np.arange(len(sizes)), sizes)
    offset = np.concatenate([np.arange(size) for size in sizes])
    own = (index[:, None] == index) & (~jnp.expand_dims(causal, -1) | (offset[:, None] >= offset))
    return own | (offset < sees[..., index, :][..., index])


def sliding(
    positions: Int[Array, "B W"],
    window: int | Int[Array, ""],
    keys: Int[Array, "#B S"] | None = None,
) -> Bool[Array, "B W S"]:
    """A position sees no position further back than its window reaches; others bound what is ahead
    (3 of 5 drawn).

    ::

        x x x x x
        x x x x x
        x x x x x
        . x x x x
        . . x x x

    Args:
      positions: absolute.
      window: positions that a query sees, its own among them.
      keys: positions of what is seen; those of the queries by default.
    """
    seen = positions if keys is None else keys
    return positions[:, :, None] - seen[:, None] < window


def visible(
    visible: Int[Array, "B"] | Bool[Array, "B S"] | Bool[Array, "B W S"], size: int
) -> Bool[Array, "B *W S"]:
    """What a window sees of a cache of `size` positions: a mask as it is, or the first so many (2
    of 5 drawn).

    ::

        x x . . .
    """
    return jnp.arange(size) < visible[:, None] if visible.ndim == 1 else visible


def lookahead(
    level: Int[Array, "B L"], column: Int[Array, "B L"], guesses: int, length: int
) -> Bool[Array, "B W W"]:
    """Lookahead decoding: L window slots by level and column, then the chains of the guesses.

    An item of a level sees level 0 up to its own column, and the levels between in its column. A
    token of a guess sees the first slot, which must be (0, 0), and its own guess up to itself. Two
    levels of two columns and two guesses g and h of two tokens drawn::

                 00 01 10 11  g  g  h  h
        level 0   x  .  .  .  .  .  .  .
                  x  x  .  .  .  .  .  .
        level 1   x  .  x  .  .  .  .  .
                  x  x  .  x  .  .  .  .
        g         x  .  .  .  x  .  .  .
                  x  .  .  .  x  x  .  .
        h         x  .  .  .  .  .  x  .
                  x  .  .  .  .  .  x  x

    Args:
      level, column: place of each window slot.
      guesses: G, number of guesses.
      length: tokens of each; W = L + G length.
    """
    batch, slots = level.shape
    above, below = level[:, None], level[:, :, None]
    here, other = column[:, :, None], column[:, None]
    window = ((above == 0) & (other <= here)) | ((other == here) & (above <= below))
    guess = jnp.repeat(jnp.arange(guesses), length)
    chains = (guess[:, None] == guess) & causal(guesses * length)
    mask = jnp.zeros((batch, slots + guesses * length, slots + guesses * length), bool)
    return (
        mask.at[:, :slots, :slots]
        .set(window)
        .at[:, slots:, slots:]
        .set(chains)
        .at[:, slots:, 0]
        .set(True)
    )


def noisy_window(prompt: int, pairs: int, block: int, window: int) -> Bool[Array, "T T"]:
    """Packed pairs: a noisy block sees the noisy blocks of its window and the clean ones before
    that.

    The sequence holds the prompt and then, for each pair, its noisy and its clean copy (`block`
    tokens each), which share their positions. Every query sees the prompt and its own block,
    causally; a clean block sees the clean ones before it. A prompt p of one token and three pairs
    of one token (~a noisy, a clean), with windows of three pairs (NC: no noisy token meets a clean
    one), of two (NC-IC) and of one (the contexts of CLLM)::

             p ~a  a ~b  b ~c  c       p ~a  a ~b  b ~c  c       p ~a  a ~b  b ~c  c
        p    x  .  .  .  .  .  .       x  .  .  .  .  .  .       x  .  .  .  .  .  .
        ~a   x  x  .  .  .  .  .       x  x  .  .  .  .  .       x  x  .  .  .  .  .
        a    x  .  x  .  .  .  .       x  .  x  .  .  .  .       x  .  x  .  .  .  .
        ~b   x  x  .  x  .  .  .       x  x  .  x  .  .  .       x  .  x  x  .  .  .
        b    x  .  x  .  x  .  .       x  .  x  .  x  .  .       x  .  x  .  x  .  .
        ~c   x  x  .  x  .  x  .       x  .  x  .  x  x  .       x  .  x  .  x  x  .
        c    x  .  x  .  x  .  x       x  .  x  .  x  .  x       x  .  x  .  x  .  x
    """
    copy = (jnp.arange(prompt + 2 * pairs * block) - prompt) // block  # negative in the prompt
    pair, clean = jnp.divmod(copy, 2)
    # Which keys a noisy query wants clean.
    before_window = pair < (pair // window * window)[:, None]
    wanted = jnp.where(clean[:, None] == 1, True, before_window)
    context = (pair < pair[:, None]) & ((clean == 1) == wanted)
    return causal(copy.shape[0]) & ((copy < 0) | (copy == copy[:, None]) | context)
