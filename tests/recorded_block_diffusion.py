"""What was recorded of SDAR's programs, and the model that it was recorded of."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import mrp, sdar
from convert.engine import in_memory, parted, read_json
from convert.weights import of_safetensors

FOLDER = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden") / "block_diffusion"


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of NAME.npz."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


@functools.cache
def cases(name: str) -> Any:
    """What NAME.json says."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def model():
    """Network, parameters and special tokens, as the converter imports them."""
    read = in_memory(sdar.read(FOLDER, read_json(FOLDER / "config.json"), "float32"))
    return read.network, jax.tree.map(jnp.asarray, read.params), read.token_spec


@functools.cache
def head():
    """The head's network and parameters, as the converter imports them."""
    with of_safetensors(FOLDER, {FOLDER / "mrp.safetensors": []}) as file:
        _, tensors = parted(file, mrp.PREFIX)
        fields = read_json(FOLDER / "config.json") | read_json(FOLDER / "mrp_config.json")
        read = mrp.read(tensors, fields, model()[0].config)
        return read.network, jax.tree.map(lambda leaf: jnp.asarray(leaf[...]), read.params)


def positions_of(tokens, start=0):
    """Absolute positions of a window that begins at `start`."""
    return jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)


def assert_close(got, want, tolerance: float) -> None:
    assert got.shape == want.shape
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert error <= tolerance, f"largest absolute difference {error:.2e}"
