"""Candidates: several guesses of the same positions, side by side in one window, sharing one prefix.

::

    tokens     a b c | d e f | g h i        R = 3 candidates of W = 3 tokens
    positions  p . . | p . . | p . .        each stands at the same positions
    mask       causal within a candidate; no candidate sees another
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from paradec_jax.decode.rules.windows import window
from paradec_jax.nn import masks


def fold_candidates(
    tokens: Int[Array, "B R W"], at: Int[Array, "B"]
) -> tuple[Int[Array, "B RW"], Int[Array, "B RW"], Bool[Array, "RW RW"] | None]:
    """Tokens, positions and mask of a window that holds every candidate; no mask where there is one.

    Args:
      tokens: R candidates of W tokens.
      at: position of each candidate's first token.
    """
    batch, count, width = tokens.shape
    positions = jnp.tile(at[:, None] + jnp.arange(width), (1, count))
    mask = masks.side_by_side(count, width) if count > 1 else None
    return tokens.reshape(batch, count * width), positions, mask


def pick(
    x: Shaped[Array, "B RW *rest"], candidate: Int[Array, "B"], width: int
) -> Shaped[Array, "B W *rest"]:
    """What belongs to one candidate of each row, of an array over the whole window."""
    return window(x, candidate * width, width)
