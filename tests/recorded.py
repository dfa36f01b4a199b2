"""Folders of recorded arrays: `PARADEC_GOLDEN/FAMILY`, or `tests/golden/FAMILY`; what the replays of all share."""

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.engine import in_memory, read_json

GOLDEN = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden")


@functools.cache
def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@functools.cache
def imported(table: Any, folder: Path):
    """Network, parameters and special tokens of a folder, as a converter imports them."""
    read = in_memory(table.read(folder, read_json(folder / "config.json"), "float32"))
    return read.network, jax.tree.map(jnp.asarray, read.params), read.token_spec


def assert_close(got, want, tolerance: float) -> None:
    assert got.shape == want.shape
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert error <= tolerance, f"largest absolute difference {error:.2e}"
