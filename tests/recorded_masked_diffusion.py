"""What was recorded of the original programs of MDLM and SDTT, and the model that it was recorded of."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert import mdlm
from convert.engine import in_memory, read_json

FOLDER = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden") / "masked_diffusion"
STUDENT = np.float32(0.9)  # the student's parameters are the teacher's times this


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of NAME.npz."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


@functools.cache
def model():
    """Network, parameters and special tokens, as the converter imports them: the teacher."""
    read = in_memory(mdlm.read(FOLDER, read_json(FOLDER / "config.json"), "float32"))
    return read.network, jax.tree.map(jnp.asarray, read.params), read.token_spec


@functools.cache
def student():
    """The student's parameters."""
    return jax.tree.map(lambda leaf: leaf * STUDENT, model()[1])


def assert_close(got, want, tolerance: float) -> None:
    assert got.shape == want.shape
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert error <= tolerance, f"largest absolute difference {error:.2e}"
