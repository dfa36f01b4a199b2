"""The switches for what suits a backend and is nobody's definition: layouts, and who computes attention."""

import os

import jax

SWITCH = "PARADEC_LAYOUTS"
ATTENTION = "PARADEC_ATTENTION"


def cpu_layouts() -> bool:
    """Whether products are laid out for XLA's CPU backend: where that is the default one, unless told otherwise.

    The environment variable `PARADEC_LAYOUTS` ("cpu" or "plain") decides for a whole process, since compiled programs
    do not know by which layout they were traced.

    Raises:
      ValueError: another value of the variable.
    """
    told = os.environ.get(SWITCH)
    if told not in (None, "cpu", "plain"):
        raise ValueError(f"{SWITCH} must be 'cpu' or 'plain', not {told!r}")
    return jax.default_backend() == "cpu" if told is None else told == "cpu"


def cudnn_attention() -> bool:
    """Whether cuDNN computes attention that is not causal: where the default backend is CUDA, unless told otherwise.

    The environment variable `PARADEC_ATTENTION` ("cudnn" or "plain") decides for a whole process, as above.

    Raises:
      ValueError: another value of the variable.
    """
    told = os.environ.get(ATTENTION)
    if told not in (None, "cudnn", "plain"):
        raise ValueError(f"{ATTENTION} must be 'cudnn' or 'plain', not {told!r}")
    if told is None:
        return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version
    return told == "cudnn"
