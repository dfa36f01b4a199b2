"""Which token a position's scores are about: its own, or the next one."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def aligned(
    scores: Shaped[Array, "B W *rest"], alignment: str, previous: Shaped[Array, "B 1 *rest"] | None = None
) -> Shaped[Array, "B W *rest"]:
    """Scores of the tokens *at* the positions of a window.

    ::

        "own"     scores[i]        is about position i
        "next"    scores[i - 1]    is about position i; scores[-1] is `previous`

    Args:
      scores: logits, or head inputs, of a window of W positions.
      alignment: of the checkpoint, `TokenSpec.alignment`.
      previous: those of the position before the window; needed for "next".

    Raises:
      ValueError: an unknown alignment, or "next" without `previous`.
    """
    if alignment == "own":
        return scores
    if alignment != "next":
        raise ValueError(f"alignment must be 'own' or 'next', not {alignment!r}")
    if previous is None:
        raise ValueError("alignment 'next' needs the scores of the position before the window")
    return jnp.concatenate([previous, scores[:, :-1]], axis=1)
