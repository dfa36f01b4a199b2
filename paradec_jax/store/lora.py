"""Low-rank adapters merged into matrices: what is trained in the place of a matrix (`nn.adapters`).

::

    W' = W + s B A,    A [r, in], B [out, r]; s = alpha / r

All parameters put their input axes before their output axes, so W + s (A^T B^T) needs no more than
a reshape: a query matrix [D, H, C] is [in, out] with out = H C.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.disk.tensors import Lazy
from paradec_jax.nn.adapters import LORA_A, LORA_B

SCALE = 2.0  # s of training, alpha = 2 r; of an adapter that was read, B has it already


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
