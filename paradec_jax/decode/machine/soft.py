"""What soft decoders of canvases share: vectors in place of given tokens."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.records import pytree


@pytree
class SoftGiven(RecordedDraws):
    """Vectors that the network reads in place of the embeddings of given tokens.

    Attributes:
      vectors: one vector for each position of `Request.tokens`, [B, P, D]; those at holes and after
        a row's length are not read.
    """

    vectors: Float[Array, "B P D"] | None = None
    per_row = ("vectors",)


def given_offsets(
    decoder: Any, request: Request, table: Float[Array, "V D"], final: Bool[Array, "B S"]
) -> Float[Array, "B S D"]:
    """What is added to the vector of each token of a fresh canvas, so that `SoftGiven` is read
    where it is given.

    Given tokens are those at `final` positions.

    Raises:
      ValueError: recorded numbers, which a soft decoder has no use for.
    """
    if getattr(request.recorded, "uniforms", None) is not None:
        name = type(decoder).__name__
        raise ValueError(f"{name} draws by its keys, so recorded.uniforms must be None")
    offsets = jnp.zeros((*final.shape, table.shape[1]), table.dtype)
    vectors = getattr(request.recorded, "vectors", None)
    if vectors is None:
        return offsets
    width = vectors.shape[1]
    difference = vectors.astype(table.dtype) - table[request.tokens]
    return offsets.at[:, :width].set(jnp.where(final[:, :width, None], difference, 0.0))
