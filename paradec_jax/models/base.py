"""What networks share: the price of a call, and how they are handed their parameters."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.decode.machine.network import Prepared
from paradec_jax.sharding.rules import gathered


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


def output(params: Any, dtype: str) -> Any:
    """The parameters with the output matrix cast and gathered (`sharding.rules.gathered`), for `logits` alone."""
    if isinstance(params, Prepared):
        return params
    name, axes = ("head", ("embed", "vocab")) if "head" in params else ("embedding", ("vocab", "embed"))
    return {**params, name: gathered(params[name], dtype, *axes)}


def shapes_of(module: Callable[[Any], Any], config: Any, parts: Mapping[str, str]) -> dict[str, Any]:
    """Shapes and dtypes of a module's parameters, without allocating any.

    Blocks of one part have equal shapes, so one of each is traced, and once for a config: it is waited for whenever a
    model is loaded.

    Args:
      module: config -> the Linen module.
      config: its shape.
      parts: the field of the config that counts the blocks of each part, "layer" -> "layers".
    """
    single = dataclasses.replace(config, **dict.fromkeys(parts.values(), 1))
    found = _traced(module, single, bool(jax.config.read("jax_enable_x64")))
    counts = {part: getattr(config, field) for part, field in parts.items()}
    shapes = {name: shape for name, shape in found.items() if name.removesuffix("_0") not in parts}
    shapes |= {f"{part}_{i}": found[f"{part}_0"] for part, n in counts.items() for i in range(n)}
    return jax.tree.map(lambda shape: shape, shapes)  # dictionaries of the caller's own


@functools.lru_cache
def _traced(module: Callable[[Any], Any], config: Any, x64: bool) -> dict[str, Any]:
    del x64  # of which float64 depends, so that shapes of one mode are not those of the other
    init = module(config).init
    return jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))["params"]
