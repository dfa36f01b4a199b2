"""What was recorded of SDAR's programs, and the model that it was recorded of."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recorded import GOLDEN, arrays_in, assert_close, imported

from paradec_jax.convert import mrp
from paradec_jax.convert.engine import Source, parted, read_json
from paradec_jax.disk.tensors import open_tensors

__all__ = ["FOLDER", "arrays", "assert_close", "cases", "head", "model"]
FOLDER = GOLDEN / "block_diffusion"


def arrays(name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / f"{name}.npz")


@functools.cache
def cases(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def model():
    """Network, parameters and special tokens."""
    return imported(FOLDER)


@functools.cache
def head():
    """The head's network and parameters, as the converter imports them."""
    _, tensors = parted(Source(FOLDER, open_tensors(FOLDER / "mrp.safetensors")), mrp.PREFIX)
    fields = read_json(FOLDER / "config.json") | read_json(FOLDER / "mrp_config.json")
    read = mrp.read(tensors, fields, model()[0].config)
    return read.network, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), read.params)
