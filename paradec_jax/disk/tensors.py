"""Tensors in safetensors: one file, or shards with an index, read one tensor at a time and checked block by block."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, the name "bfloat16")
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paradec_jax.disk.folders import StoreError
from paradec_jax.io import read_object

BLOCK = 16 * 2**20
INDEX = ".safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tensor to be written: its size in bytes, and how to make it."""

    nbytes: int
    make: Callable[[], np.ndarray]


class Header(NamedTuple):
    """Shape of an array, and its type by NumPy's name."""

    shape: tuple[int, ...]
    dtype: str


def write_tensors(
    folder: Path, tensors: Mapping[str, Lazy], max_shard_bytes: int, stem: str = "model"
) -> str:
    """Writes one safetensors file, or shards of at most `max_shard_bytes` (or one tensor) and their index.

    Returns:
      The name of the file, or of the index.
    """
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in sorted(tensors):
        if tensors[name].nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensors[name].nbytes
    if len(shards) == 1:
        _write_shard(folder / f"{stem}.safetensors", tensors, shards[0])
        return f"{stem}.safetensors"
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, tensors, names)
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return f"{stem}{INDEX}"


def _write_shard(path: Path, tensors: Mapping[str, Lazy], names: Sequence[str]) -> None:
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that only their owner can read
    arrays = {name: np.ascontiguousarray(tensors[name].make()) for name in names}
    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)


def digests(array: np.ndarray) -> list[str]:
    """SHA-256 of each block of 16 MiB of an array's little-endian bytes, so that parts can be checked alone."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    blocks = range(0, max(data.size, 1), BLOCK)
    return [hashlib.sha256(data[start : start + BLOCK].data).hexdigest() for start in blocks]


def finite(array: np.ndarray) -> bool:
    """Whether no number is NaN or infinite, looked at block by block."""
    data = np.ascontiguousarray(array).reshape(-1)
    step = BLOCK // data.itemsize
    return all(np.isfinite(data[start : start + step]).all() for start in range(0, data.size, step))


class TensorFiles:
    """Tensors of several safetensors files, read one at a time.

    Args:
      listed: the files, each with the names that an index promises.
      rename: what a stored name is known by.

    Raises:
      StoreError: when a file is missing, truncated, not safetensors, or a name occurs twice.
    """

    def __init__(
        self, listed: Mapping[Path, Sequence[str]], rename: Callable[[str], str] = lambda name: name
    ) -> None:
        self._tensors: dict[str, tuple[Any, str]] = {}
        self._files: list[Any] = []
        for path in listed:
            file = _open(path)
            self._files.append(file)
            for stored in file.keys():  # noqa: SIM118  (not a mapping)
                name = rename(stored)
                if name in self._tensors:
                    raise StoreError(f"tensor {name} occurs twice in {path.parent}")
                self._tensors[name] = file, stored
        for path, names in listed.items():
            for name in names:
                if rename(name) not in self._tensors:
                    raise StoreError(f"tensor {name} is listed in an index, but {path} does not hold it")

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, value, trace)

    @property
    def names(self) -> set[str]:
        """Names of all tensors, renamed."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        file, stored = self._tensors[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Type of a tensor, from the header: NumPy's name of a floating point type, else the file's own."""
        file, stored = self._tensors[name]
        kind = file.get_slice(stored).get_dtype()
        return DTYPES.get(kind, kind)

    def header(self, name: str) -> "Header":
        """Shape and type of a tensor, before any of it is read."""
        return Header(self.shape(name), self.dtype(name))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor itself, or these rows of it.

        Raises:
          StoreError: a type that NumPy does not know.
        """
        file, stored = self._tensors[name]
        try:
            return file.get_tensor(stored) if rows == slice(None) else file.get_slice(stored)[rows]
        except (SafetensorError, AttributeError, TypeError, KeyError) as error:
            raise StoreError(
                f"tensor {name} is {self.dtype(name)}, which cannot be read ({error})"
            ) from error


def listed_in(index: Path) -> dict[Path, list[str]]:
    """The files of an index, each with the names that it promises.

    Raises:
      StoreError: when the index is no JSON, names no files, or one that is missing.
    """
    try:
        weight_map = read_object(index).get("weight_map")
    except (ValueError, OSError) as error:
        reason = str(error).replace(f"{index} ", "it ")
        raise StoreError(f"{index} is missing or not valid JSON: {reason}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{index} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise StoreError(f"{index} places tensor {name} in {file!r}, which is no file name")
        files.setdefault(index.parent / file, []).append(name)
    for path in files:
        if not path.is_file():
            raise StoreError(f"shard {path} is missing, although {index.name} lists it")
    return files


def pickle_refused(path: Path) -> str:
    """The sentence about a pickle file."""
    return f"{path} is a pickle, which is never unpickled; convert it to safetensors"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        if not path.is_file():
            raise StoreError(f"{path} is missing") from error
        if _magic(path).startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
            raise StoreError(pickle_refused(path)) from error
        raise StoreError(f"{path} is truncated or not a safetensors file ({error})") from error


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
