"""Deeper networks from trained ones: new layers that begin by passing on what they are given."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.families import init_params


def deepen_core(
    config: RecurrentDepthConfig, params: dict[str, Any], key: Array, copies: int = 1
) -> tuple[RecurrentDepthConfig, dict[str, Any]]:
    """Puts `copies` new layers after every layer of the core.

    A new sandwich block has output matrices of zero, so that of `norm_2(x + attention)` and
    `norm_4(x + mlp)` the norms are left, and their gain is one number, the root mean square g of
    the gain that x left the old layer with::

        block(x) = g x / rms(x)

    which is x but for the spread of rms(x) over positions. Its other matrices are random, so it
    learns from the first update on. (Zero output matrices as in Bachlechner et al. 2021; layers
    grown between trained ones as in Net2Net, Chen et al. 2016.)

    Args:
      config: of the trained network.
      params: its parameters.
      key: of the new layers' random matrices.
      copies: new layers after each old one.

    Returns:
      Config and parameters of the deeper network.

    Raises:
      ValueError: `copies` below 1.
    """
    if copies < 1:
        raise ValueError(f"copies must be at least 1, not {copies}")
    deeper = dataclasses.replace(config, core_layers=config.core_layers * (1 + copies))
    fresh = init_params(deeper, key)
    grown = {name: tree for name, tree in params.items() if not name.startswith("core_")}
    for place in range(deeper.core_layers):
        old = params[f"core_{place // (1 + copies)}"]
        name = f"core_{place}"
        grown[name] = _passing(fresh[name], old["norm_4"]) if place % (1 + copies) else old
    return deeper, grown


def _passing(block: dict[str, Any], gain: Array) -> dict[str, Any]:
    """A block that scales every vector to the norm that `gain` gives on average."""
    gain = jnp.full_like(gain, jnp.sqrt(jnp.mean(jnp.square(gain))))
    nothing = jax.tree.map(
        jnp.zeros_like, {"out": block["attention"]["out"], "down": block["mlp"]["down"]}
    )
    return block | {
        "attention": block["attention"] | {"out": nothing["out"]},
        "mlp": block["mlp"] | {"down": nothing["down"]},
        "norm_2": gain,
        "norm_4": gain,
    }
