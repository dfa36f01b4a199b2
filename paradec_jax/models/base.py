"""What every network returns and reports."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that a network call must read and floating-point operations it must do."""

    bytes: int
    flops: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """What one call of a network returns: head input, latent (no channels where there is none), keys and values."""

    hidden: Float[Array, "B W D"]
    latent: Float[Array, "B W _"]
    kv: Any


def lay_out_head(params: Any) -> Any:
    """Parameters with the tied output matrix laid out once, as `head` [D, V].

    The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one.
    """
    return {**params, "head": lax.optimization_barrier(params["embedding"].T)}
