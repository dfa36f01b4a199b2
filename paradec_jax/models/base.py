"""Shapes of a model's parameters."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


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
