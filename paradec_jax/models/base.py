"""What every network returns and reports."""

import dataclasses
from typing import Any

import jax
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Parameters as decoding loops want them (`models.prepare`), told from raw ones by their type."""

    params: dict[str, Any]
