"""Models of format 1: parameters in Orbax with one digest each, matrices joined, read and split but never written.

attention/qkv      recurrent: [D, 3, H, C]; causal: [D, H + 2G, C]      ->  q [D, H, C], k and v [D, G, C]
attention/qk_bias  recurrent: [2, H, C]                                 ->  q_bias, k_bias
attention/bias     causal: [H + 2G, C]                                  ->  q_bias, k_bias, v_bias
mlp/gate_up        [D, 2, F]                                            ->  gate, up [D, F]
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import CausalConfig, ModelConfig
from paradec_jax.disk.description import check_leaf, check_names
from paradec_jax.disk.folders import StoreError

# Path of a joined parameter: what it is split into, and along which axis.
JOINED: dict[str, tuple[tuple[str, ...], int]] = {
    "attention/qkv": (("q", "k", "v"), 1),
    "attention/qk_bias": (("q_bias", "k_bias"), 0),
    "attention/bias": (("q_bias", "k_bias", "v_bias"), 0),
    "mlp/gate_up": (("gate", "up"), 1),
}


def names(path: str) -> list[str]:
    """Paths of the parameters that a parameter of format 1 is split into."""
    parts = path.split("/")
    found = JOINED.get("/".join(parts[-2:]))
    return ["/".join([*parts[:-1], name]) for name in found[0]] if found else [path]


def split(path: str, leaf: np.ndarray, config: ModelConfig) -> list[tuple[str, np.ndarray]]:
    """A parameter of format 1 as those of today.

    Raises:
      StoreError: when its shape contradicts the config.
    """
    into = names(path)
    if into == [path]:
        return [(path, leaf)]
    _, axis = JOINED["/".join(path.split("/")[-2:])]
    sizes, grouped = [1] * len(into), False
    if isinstance(config, CausalConfig) and "/attention/" in path:
        sizes, grouped = [config.heads, config.kv_heads, config.kv_heads], True
    if leaf.ndim <= axis or leaf.shape[axis] != sum(sizes):
        raise StoreError(
            f"parameter {path} has shape {leaf.shape}, but the config asks for {sum(sizes)} in axis {axis}"
        )
    pieces = np.split(leaf, np.cumsum(sizes)[:-1], axis=axis)
    if not grouped:
        pieces = [piece.squeeze(axis) for piece in pieces]
    return [(name, np.ascontiguousarray(piece)) for name, piece in zip(into, pieces, strict=True)]


def digest(leaf: np.ndarray) -> str:
    """SHA-256 over type, shape and little-endian bytes."""
    found = hashlib.sha256(f"{leaf.dtype.name}{list(leaf.shape)}".encode())
    found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def read(
    folder: Path,
    config: ModelConfig,
    recorded: Mapping[str, str],
    expected: Mapping[str, Any],
    *,
    verify: bool = True,
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of a folder one after the other, compared with their recorded digests and then split.

    Args:
      folder: the model folder.
      config: its config.
      recorded: digests by the paths of format 1.
      expected: shapes and types by today's paths.
      verify: whether digests are compared.

    Raises:
      StoreError: when one is missing, damaged or misshapen.
    """
    check_names(expected, {name for path in recorded for name in names(path)})
    sizes = {path: sum(math.prod(expected[name].shape) for name in names(path)) for path in recorded}
    for path, leaf in _read_leaves(folder / "params", sizes):
        if verify and recorded[path] != digest(leaf):
            raise StoreError(f"parameter {path} differs from its digest in config.json")
        for name, piece in split(path, leaf, config):
            check_leaf(expected, name, piece)
            yield name, piece


def _read_leaves(directory: Path, sizes: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads one parameter of so many numbers after the other, as NumPy arrays."""
    # Here, because they take long and folders of today need neither.
    import orbax.checkpoint as ocp
    import tensorstore
    from etils import epath

    where = os.path.abspath(directory)
    base = {"driver": "file", "path": f"{where}/"}
    try:
        files = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    except Exception as error:  # see below
        raise StoreError(f"parameter files in {directory.name}/ are missing or damaged") from error
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for path, size in sizes.items():
            _check_header(files, path, size)  # Orbax would allocate without a second look
            arguments = ocp.args.PyTreeRestore(
                item=unflatten_dict({path: 0}, sep="/"),
                restore_args=unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)}, sep="/"),
                partial_restore=True,
            )
            try:
                tree = checkpointer.restore(epath.Path(where), args=arguments)
            except Exception as error:  # Orbax raises whatever its backends do
                raise StoreError(f"parameter {path} is missing or damaged in {directory.name}/") from error
            yield path, flatten_dict(tree, sep="/")[path]


def _check_header(files: Any, path: str, size: int) -> None:
    """Refuses an array that would be larger in memory than the config says, whatever its files take."""
    try:
        header = json.loads(files.read(f"{path.replace('/', '.')}/.zarray").result().value)
        shape, chunk = tuple(header["shape"]), tuple(header["chunks"])
        fits = math.prod(shape) == size and math.prod(chunk) <= max(size, 1)
    except Exception as error:  # see above
        raise StoreError(f"parameter {path} is missing or damaged in params/") from error
    if not fits:
        raise StoreError(
            f"parameter {path} has shape {shape} in pieces of {chunk}, but the config asks for {size} numbers"
        )
