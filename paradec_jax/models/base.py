"""What networks share: the price of a call, and how they are handed their parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

from paradec_jax.decode.machine.network import Prepared


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that a network call must read and floating-point operations it must do."""

    bytes: int
    flops: int


def raw(params: Any) -> Any:
    """The parameter tree, prepared or not."""
    return params.params if isinstance(params, Prepared) else params


def apply(module: type, config: Any, params: Any, method: Callable, *args: Any) -> Any:
    """A method of a Linen module on raw or prepared parameters."""
    prepared = isinstance(params, Prepared)
    return module(config, prepared).apply({"params": raw(params)}, *args, method=method)
