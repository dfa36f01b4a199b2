"""What networks share: the price of a call, and parameters laid out for decoding."""

import dataclasses
from typing import Any

from jax import lax

from paradec_jax.decode.machine.network import Prepared


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that a network call must read and floating-point operations it must do."""

    bytes: int
    flops: int


def raw(params: Any) -> Any:
    """The parameter tree, prepared or not."""
    return params.params if isinstance(params, Prepared) else params


def lay_out_head(params: Any) -> Any:
    """Parameters with the tied output matrix laid out once, as `head` [D, V].

    The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one.
    """
    return {**params, "head": lax.optimization_barrier(params["embedding"].T)}
