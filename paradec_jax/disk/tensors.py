"""Tensors in safetensors files: read when their numbers are asked for, written shard by shard."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paradec_jax.disk.folders import StoreError
from paradec_jax.io import regular

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
MAX_HEADER_BYTES, MAX_TENSORS = 2**24, 20_000  # of a file
MAX_SHARD_BYTES = 256 * 10**6  # the writer has all tensors of a file in memory


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tensor that is read, or made, when `np.asarray` asks for its numbers.

    Attributes:
      shape: its shape.
      dtype: NumPy's name of its type; of a type that is not floating point, the file's name.
      read: index -> those of its numbers, of any strides; `()` stands for all of them.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Any], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(()), dtype)


def finite(path: str, tensor: Lazy) -> Lazy:
    """The tensor, whose reader refuses numbers that are NaN or infinite with a StoreError."""

    def read(index: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # what becomes infinite is refused
            numbers = tensor.read(index)
        if not np.isfinite(numbers).all():
            raise StoreError(
                f"parameter {path} holds numbers that are NaN or infinite; allow_nonfinite takes them"
            )
        return numbers

    return dataclasses.replace(tensor, read=read)


def open_tensors(path: Path) -> dict[str, Lazy]:
    """The tensors of a safetensors file, which stays open as long as one of them is kept.

    Raises:
      StoreError: a file that is missing, truncated, of another format, or names something twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("its header has a name twice")
        if len(pairs) > MAX_TENSORS:
            raise ValueError(f"its header has {len(pairs)} names, and {MAX_TENSORS} are allowed")

    try:
        with regular(path).open("rb") as header:
            size = int.from_bytes(header.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {size} bytes")
            json.loads(header.read(size), object_pairs_hook=once)
        # Read, not mapped: pages of a map count as memory of the process once they are read.
        file = safe_open(path, framework="numpy", backend="pread")
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing") from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is truncated or not a safetensors file ({error})") from error
    tensors = {}
    for name in file.keys():  # noqa: SIM118  (the file is no dictionary)
        view = file.get_slice(name)
        kind = view.get_dtype()
        tensors[name] = Lazy(tuple(view.get_shape()), DTYPES.get(kind, kind), view.__getitem__)
    return tensors


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Writes STEM.safetensors, or shards of at most `MAX_SHARD_BYTES` (or one tensor) each.

    Tensors are arrays on a device or on the host, or `Lazy` ones. Returned are the names of the
    files, each with those of its tensors.

    Raises:
      StoreError: a file that cannot be written.
    """
    shards: list[list[str]] = [[]]
    room = MAX_SHARD_BYTES
    for name in sorted(tensors):
        size = math.prod(tensors[name].shape) * np.dtype(tensors[name].dtype).itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= size
    count, files = len(shards), {}
    for i, names in enumerate(shards, start=1):
        file = f"{stem}.safetensors" if count == 1 else f"{stem}-{i:05d}-of-{count:05d}.safetensors"
        path = folder / file
        try:
            # No name for the arrays: those of the shard before must be gone while these are made.
            save_file(
                {n: np.asarray(tensors[n], order="C") for n in names},
                path,
                metadata={"format": "pt"},
            )
        except SafetensorError as error:
            raise StoreError(f"{path} cannot be written ({error})") from error
        # The library makes a file that its owner alone can read.
        path.chmod(folder.stat().st_mode & 0o666)
        files[file] = names
    return files
