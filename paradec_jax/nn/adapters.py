"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): what stands beside a matrix.

::

    y = x W                 rows of text
    y = x W + (x A^T) B^T   rows that the adapters change;  A [r, in], B [out, r], B = 0 at the start

Merged into the matrices (`store.lora`) an adapter changes every row. Here it is read beside them,
by some rows of a call alone, so that all others are what they are without it.

An adapter is a nested dict whose paths are those of the matrices that it changes:
"layer_0/attention/q/lora_a" and ".../lora_b". A and B have the shapes that PEFT stores: inputs and
outputs of a matrix are one axis each, whatever axes its parameter has.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Bool, Float

from paradec_jax.nn.products import dense

LORA_A, LORA_B = "lora_a", "lora_b"
LORA = "lora"  # what the parameters of a branch name the adapters of its matrices

Axes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def init_lora(params: Mapping[str, Any], axes: Axes, rank: int, key: Array) -> dict[str, Any]:
    """An adapter that changes nothing yet: float32, A uniform in +-1/sqrt(in) as in PEFT, B zero.

    Args:
      params: parameters, or shapes of them; those of some layers alone for an adapter of these
        layers.
      axes: of `sharding.axes.matrices`; every matrix that it names is adapted.
      rank: r.
      key: key of the draws.

    Raises:
      ValueError: a rank below 1, or above the smaller side of a matrix.
    """
    adapter: dict[str, Any] = {}
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        places = [inputs for pattern, (inputs, _) in axes.items() if re.search(pattern, name)]
        if not places:
            continue
        wide = math.prod(leaf.shape[axis] for axis in places[0])
        out = math.prod(leaf.shape) // wide
        if not 1 <= rank <= min(wide, out):
            raise ValueError(
                f"the rank of an adapter must be 1 to {min(wide, out)} for {name} [{wide}, {out}], not {rank}"
            )
        bound, of_leaf = wide**-0.5, jax.random.fold_in(key, i)
        a = jax.random.uniform(of_leaf, (rank, wide), minval=-bound, maxval=bound)
        adapter |= {f"{name}/{LORA_A}": a, f"{name}/{LORA_B}": jnp.zeros((out, rank))}
    return unflatten_dict(adapter, sep="/")


def laid_out(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter as `adapted` reads it: by branch [in, r] and [r, out] of each matrix, as `lora`."""
    if all(LORA_A in matrix for matrix in adapter.values()):
        return {LORA: {name: (of[LORA_A].T, of[LORA_B].T) for name, of in adapter.items()}}
    return {name: laid_out(part) for name, part in adapter.items()}


def beside(params: Mapping[str, Any], adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, and among those of each branch its adapters as `laid_out`."""
    return {
        **params,
        **{name: x if name == LORA else beside(params[name], x) for name, x in adapter.items()},
    }


def adapted(
    module: Any,
    name: str,
    x: Float[Array, "B W _"],
    product: Float[Array, "B W F"],
    where: Bool[Array, "B W"] | None,
) -> Float[Array, "B W F"]:
    """The product of x with a matrix of the module, and in some rows the adapter's added to it.

    Args:
      module, name: branch of a block, and the matrix among its parameters.
      x, product: rows, and what the matrix makes of them.
      where: rows that the adapter changes; all others are the product to the bit.
    """
    if where is None:
        return product
    adapters = module.get_variable("params", LORA)
    if adapters is None or name not in adapters:
        return product
    down, up = adapters[name]
    return jnp.where(where[..., None], product + dense(dense(x, down), up), product)
