"""What was recorded of the original causal program, and the models that it was recorded of."""

from pathlib import Path

import numpy as np
from recorded import GOLDEN, arrays_in, imported

FOLDER = GOLDEN / "jacobi"
MODELS = sorted(path.name.removesuffix("_greedy.npz") for path in FOLDER.glob("*_greedy.npz"))


def models(kind: str) -> list[str]:
    """Names of the models that have a file of this kind."""
    return sorted(path.name.removesuffix(f"_{kind}.npz") for path in FOLDER.glob(f"*_{kind}.npz"))


def arrays(name: str, kind: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / f"{name}_{kind}.npz")


def arrays_if_any(name: str, kind: str) -> dict[str, np.ndarray]:
    """None where there is no such file."""
    return arrays(name, kind) if (FOLDER / f"{name}_{kind}.npz").is_file() else {}


def folder_of(name: str) -> Path:
    """Each model but one lies in a folder of its own name."""
    own = FOLDER / name
    return own if own.is_dir() else FOLDER


def model(name: str):
    """Network, parameters and special tokens."""
    return imported(folder_of(name))


def recorded_rows(name: str) -> tuple[list[list[int]], list[list[int]]]:
    want = arrays(name, "greedy")

    def rows(tokens, lengths):
        return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]

    return rows(want["prompts"], want["prompt_len"]), rows(want["outputs"], want["output_len"])
