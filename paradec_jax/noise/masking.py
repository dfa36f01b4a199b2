"""Hides tokens under the mask."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def hide(
    tokens: Int[Array, "B S"],
    uniforms: Float[Array, "B S"],
    probability: Float[Array, "B"],
    mask: int,
    where: Bool[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """Puts the mask over each token with the probability of its row: where `uniform < probability`.

    Args:
      tokens: the text.
      uniforms: a number in [0, 1) for each token.
      probability: of each row.
      mask: the mask's id.
      where: tokens that may be hidden; all when None.

    Returns:
      The noised text, and which of its tokens are hidden.
    """
    hidden = uniforms < probability[:, None]
    if where is not None:
        hidden &= where
    return jnp.where(hidden, mask, tokens), hidden
