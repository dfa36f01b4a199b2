"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): what is trained in the place of a
matrix.

::

    W' = W + s B A,    A [r, in], B [out, r], B = 0 at the start; s = alpha / r

An adapter is a nested dict whose paths are those of the matrices that it changes:
"layer_0/attention/q/lora_a" and ".../lora_b". A and B have the shapes that PEFT stores: inputs and
outputs of a matrix are one axis each, whatever axes its parameter has. All parameters put their
input axes before their output axes, so W + s (A^T B^T) needs no more than a reshape: a query matrix
[D, H, C] is [in, out] with out = H C.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from paradec_jax.disk.tensors import Lazy

LORA_A, LORA_B = "lora_a", "lora_b"
SCALE = 2.0  # s of training, alpha = 2 r; of an adapter that was read, B has it already

Axes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def init_lora(params: Mapping[str, Any], axes: Axes, rank: int, key: Array) -> dict[str, Any]:
    """An adapter that changes nothing yet: float32, A uniform in +-1/sqrt(in) as in PEFT, B zero.

    Args:
      params: parameters, or shapes of them; those of some layers alone for an adapter of these
        layers.
      axes: of `families.matrix_axes`; every matrix that it names is adapted.
      rank: r.
      key: of the draws.

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


def merge(params: Mapping[str, Any], adapter: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The parameters with W + s B A in the place of each W that the adapter names, summed in
    float32.

    Training differentiates through it: `loss(merge(frozen, adapter, SCALE), ...)` has gradients
    towards A and B. A sum takes the dtype of its W; bfloat16 rounds away what changes a number by
    less than 1/512. That of a `Lazy` parameter is made when it is read, and stays float32 for the
    reader to round, once.
    """

    def merged(weight: Any, changes: Mapping[str, Any]) -> Any:
        if LORA_A not in changes:
            inner = {name: merged(weight[name], change) for name, change in changes.items()}
            return {**weight, **inner}

        def change() -> Any:  # s B A
            return (scale * (changes[LORA_A].T @ changes[LORA_B].T)).reshape(weight.shape)

        if not isinstance(weight, Lazy):
            return (weight.astype(jnp.float32) + change()).astype(weight.dtype)

        def read(index: Any) -> np.ndarray:
            return weight.read(index).astype(np.float32) + change()[index]

        return dataclasses.replace(weight, read=read)

    with jax.default_matmul_precision("float32"):
        return merged(params, adapter)
