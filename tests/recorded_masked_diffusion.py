"""What was recorded of the original programs of MDLM and SDTT, and the model that it was recorded of."""

import functools

import jax
import numpy as np
from recorded import GOLDEN, arrays_in, assert_close, imported

from convert import mdlm

__all__ = ["FOLDER", "arrays", "assert_close", "model", "student"]
FOLDER = GOLDEN / "masked_diffusion"
STUDENT = np.float32(0.9)  # the student's parameters are the teacher's times this


def arrays(name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / f"{name}.npz")


def model():
    """Network, parameters and special tokens: the teacher."""
    return imported(mdlm, FOLDER)


@functools.cache
def student():
    return jax.tree.map(lambda leaf: leaf * STUDENT, model()[1])
