"""The switches for what suits a backend and is nobody's definition: layouts, and who computes
attention.

Environment variables decide for a whole process, since compiled programs do not know how they were
traced.
"""

import os

import jax

SWITCH = "PARADEC_LAYOUTS"
ATTENTION = "PARADEC_ATTENTION"


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

    The environment variable `PARADEC_ATTENTION` ("cudnn" or "plain") overrules that.

    Raises:
      ValueError: another value of the variable.
    """
    chosen = _chosen(ATTENTION, "cudnn")
    if chosen is None:
        return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version
    return chosen


def _chosen(variable: str, word: str) -> bool | None:
    """Whether a variable is `word` and not "plain"; None where it is not set."""
    value = os.environ.get(variable)
    if value not in (None, word, "plain"):
        raise ValueError(f"{variable} must be {word!r} or 'plain', not {value!r}")
    return None if value is None else value == word
