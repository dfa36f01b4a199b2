"""What was recorded of the original programs of MDLM and SDTT, and the model that it was recorded
of.
"""

import functools

import jax
import numpy as np
from recorded import GOLDEN, arrays_in, assert_close, exported, imported, part_of

from paradec_jax.convert import mdlm

FOLDER = GOLDEN / "masked_diffusion"
STUDENT = np.float32(0.9)  # the student's parameters are the teacher's times this


def arrays(name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / f"{name}.npz")


def model():
    """Network, parameters and special tokens: the teacher."""
    return imported(FOLDER)


@functools.cache
def student():
    return jax.tree.map(lambda leaf: leaf * STUDENT, model()[1])


def assert_log_probs(got, want: np.ndarray):
    """Log-probabilities are those recorded; of the mask near -1e6, which float32 knows to 1/16."""
    others = np.arange(want.shape[-1]) != model()[2].mask
    assert_close(got[..., others], want[..., others], 1e-4)
    assert_close(got[..., ~others], want[..., ~others], 0.13)


def assert_gradients(grads, want: dict[str, np.ndarray]):
    """The norm of each parameter's gradient in the original order, of all together, and some
    gradients.
    """
    config = model()[0].config
    tensors = exported(mdlm, config, grads)
    norms = [
        np.linalg.norm(tensors[name].astype(np.float64)) for name in mdlm.parameter_order(config)
    ]
    np.testing.assert_allclose(norms, want["grad_norm_per_param"], rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(norms), want["grad_global_norm"], rtol=1e-4)
    for name, gradient in part_of(want, "grad/").items():
        assert_close(tensors[name], gradient, 1e-4 * np.abs(gradient).max())
