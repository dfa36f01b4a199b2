"""The switches for what suits a backend and is nobody's definition: layouts, who computes attention,
kernels for few rows.

Environment variables decide for a whole process, since compiled programs do not know how they were
traced.
"""

import os
from typing import Any

import jax
from jax import lax

from paradec_jax.sharding.rules import sizes_in_force

SWITCH = "PARADEC_LAYOUTS"
ATTENTION = "PARADEC_ATTENTION"
FEW = 64  # rows of a product, or positions of a window, that kernels serve


def cpu_layouts() -> bool:
    """Whether products are laid out for XLA's CPU backend: where that is the default one.

    The environment variable `PARADEC_LAYOUTS` ("cpu" or "plain") overrules that.

    Raises:
      ValueError: another value of the variable.
    """
    chosen = _chosen(SWITCH, "cpu")
    return jax.default_backend() == "cpu" if chosen is None else chosen


def cudnn_attention() -> bool:
    """Whether cuDNN computes attention where a config asks for it: where the default backend is
    CUDA.

    The environment variable `PARADEC_ATTENTION` ("cudnn" or "plain") overrules that; "plain" also
    forbids kernels for few rows (`kernels`).

    Raises:
      ValueError: another value of the variable.
    """
    chosen = _chosen(ATTENTION, "cudnn")
    if chosen is None:
        return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version
    return chosen


def kernels(attention: str, rows: int, *arrays: Any) -> bool:
    """Whether a call on so many rows may be made of kernels (`nn.row_kernel`, `nn.window_kernel`),
    which a program for CUDA then holds.

    Rows are few, all arrays are bfloat16, nothing lies on a mesh, the config's attention is another
    than "dense", and no GPU that is there is older than bfloat16 (compute capability 8).
    """
    plain = cpu_layouts() or attention == "dense" or _chosen(ATTENTION, "cudnn") is False
    plain |= float(getattr(jax.devices()[0], "compute_capability", 8)) < 8
    sixteen = all(array.dtype == "bfloat16" for array in arrays)
    return sixteen and not (plain or rows > FEW or sizes_in_force())


def on_cuda(kernel: Any, plain: Any, *arrays: Any) -> Any:
    """What `plain` computes: by `kernel` in a program for CUDA where nothing is differentiated."""
    computed = jax.custom_jvp(kernel)
    computed.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return lax.platform_dependent(*arrays, cuda=computed, default=plain)


def _chosen(variable: str, word: str) -> bool | None:
    """Whether a variable is `word` and not "plain"; None where it is not set."""
    value = os.environ.get(variable)
    if value not in (None, word, "plain"):
        raise ValueError(f"{variable} must be {word!r} or 'plain', not {value!r}")
    return None if value is None else value == word
