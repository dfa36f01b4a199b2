"""What was recorded of the original causal program, and the models that it was recorded of."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert import qwen2
from convert.engine import in_memory, read_json

FOLDER = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden") / "jacobi"
MODELS = sorted(path.name.removesuffix("_greedy.npz") for path in FOLDER.glob("*_greedy.npz"))


def models(kind: str) -> list[str]:
    """Names of the models that have a file of this kind."""
    return sorted(path.name.removesuffix(f"_{kind}.npz") for path in FOLDER.glob(f"*_{kind}.npz"))


@functools.cache
def arrays(name: str, kind: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}_{kind}.npz", allow_pickle=False) as file:
        return dict(file)


def folder_of(name: str) -> Path:
    """Each model but one lies in a folder of its own name."""
    own = FOLDER / name
    return own if own.is_dir() else FOLDER


@functools.cache
def model(name: str):
    """Network, parameters and special tokens, as the converter imports them."""
    folder = folder_of(name)
    read = in_memory(qwen2.read(folder, read_json(folder / "config.json"), "float32"))
    return read.network, jax.tree.map(jnp.asarray, read.params), read.token_spec


def recorded_rows(name: str) -> tuple[list[list[int]], list[list[int]]]:
    want = arrays(name, "greedy")

    def rows(tokens, lengths):
        return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]

    return rows(want["prompts"], want["prompt_len"]), rows(want["outputs"], want["output_len"])


@functools.cache
def arrays_if_any(model: str, kind: str) -> dict[str, np.ndarray]:
    """None where there is no such file."""
    path = FOLDER / f"{model}_{kind}.npz"
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
