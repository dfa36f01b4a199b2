"""Folders of recorded arrays: `PARADEC_GOLDEN/FAMILY`, or `tests/golden/FAMILY`; what the replays
of all share.
"""

import functools
import os
from pathlib import Path

import jax
import numpy as np

from paradec_jax import store
from paradec_jax.convert.engine import export_tree
from paradec_jax.objective import Objective

# What replays compare with, and how they compile a function of a network or a decoder.
equal, near = np.testing.assert_array_equal, np.testing.assert_allclose
jitted = functools.partial(jax.jit, static_argnums=0)
GOLDEN = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden")


@functools.cache
def arrays_in(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@functools.cache
def imported(folder: Path):
    """Network, parameters and special tokens of a folder, as a converter imports them."""
    read = store.load(folder, dtype="float32")
    return read.network, read.params, read.token_spec


def part_of(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin so, by the rest of their names."""
    return {
        key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)
    }


def exported(table, config, tree) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, by the names and in the layout of the original program."""
    tensors = export_tree(jax.tree.map(np.asarray, tree), table.table(config))
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(owner, method: str, *arguments):
    """A method of a network or a decoder, compiled."""
    return getattr(owner, method)(*arguments)


@functools.cache
def step_of(objective: Objective):
    """The value, the metrics and the gradients of an objective, compiled."""
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def graded(objective: Objective, params, frozen, batch):
    """Loss, metrics and gradients of a batch."""
    (loss, metrics), grads = step_of(objective)(params, frozen, batch, jax.random.key(0))
    return float(loss), metrics, jax.tree.map(np.asarray, grads)


def assert_gradients(tensors: dict[str, np.ndarray], case: dict[str, np.ndarray], tolerance: float):
    """The norm of each parameter's gradient, `gradnorm.NAME`, and some gradients, `grad.NAME`."""
    norms = part_of(case, "gradnorm.")
    assert norms.keys() == tensors.keys()
    for parameter, want in norms.items():
        assert abs(np.linalg.norm(tensors[parameter]) - want) <= tolerance * want, parameter
    for parameter, want in part_of(case, "grad.").items():
        assert_close(tensors[parameter], want, tolerance * float(np.abs(want).max()))


def assert_close(got, want, tolerance: float):
    assert got.shape == want.shape
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert error <= tolerance, f"largest absolute difference {error:.2e}"
