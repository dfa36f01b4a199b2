"""Tensors in safetensors: one file, or shards with an index, read one tensor, or some slices of one, at a time.

The library checks the headers and maps files into memory; bytes are read from the files themselves, since pages of a
map that were read count as the process's own.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import jax
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
from safetensors import SafetensorError, safe_open

from paradec_jax.disk import blocks
from paradec_jax.disk.folders import StoreError
from paradec_jax.io import read_object

INDEX = ".safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
OTHERS = {"BOOL": "bool", "U8": "uint8", **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}}
MOST_AT_ONCE = 2**30  # bytes; systems read 2 GiB in one call at most


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tensor that is read, or made, when it is indexed.

    Attributes:
      shape: its shape.
      dtype: its type.
      read: gives what lies at an index; of any strides, and perhaps still of another type.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[Any], np.ndarray]

    @classmethod
    def of(cls, array: Any) -> "Lazy":
        """An array on a device or on the host."""
        return cls(array.shape, array.dtype, lambda place: _on_host(array)[place])

    def __getitem__(self, place: Any) -> np.ndarray:
        with np.errstate(over="ignore"):  # whether numbers are infinite is looked at elsewhere
            return np.asarray(self.read(place), self.dtype, order="C")

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.size * np.dtype(self.dtype).itemsize


def _on_host(array: Any) -> np.ndarray:
    """The numbers of an array.

    JAX keeps in an array what was copied from its devices, as long as the array lives. So another array over the same
    buffers is asked, and dropped.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    held = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, held))


class Header(NamedTuple):
    """Shape of an array, and its type by NumPy's name."""

    shape: tuple[int, ...]
    dtype: str


class _Stored(NamedTuple):
    """A tensor in a file: its header, and where its bytes begin and end."""

    file: BinaryIO
    header: Header
    begin: int
    end: int


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
        self._tensors: dict[str, _Stored] = {}
        with contextlib.ExitStack() as files:
            for path in listed:
                for stored, tensor in _stored(path, files.enter_context(_open(path))):
                    name = rename(stored)
                    if name in self._tensors:
                        raise StoreError(f"tensor {name} occurs twice in {path.parent}")
                    self._tensors[name] = tensor
            for path, names in listed.items():
                for name in names:
                    if rename(name) not in self._tensors:
                        raise StoreError(f"tensor {name} is listed in an index, but {path} does not hold it")
            self._files = files.pop_all()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors, renamed."""
        return set(self._tensors)

    def header(self, name: str) -> Header:
        """Shape and type of a tensor, before any of it is read; another type than floating point as the file says."""
        return self._tensors[name].header

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor itself, or these rows of it, as they are.

        Raises:
          StoreError: a type that NumPy does not know, or a file that ends too early.
        """
        shape, dtype = self.header(name).shape, self._numpy(name)
        begin, end, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        array = np.empty((max(end - begin, 0), *shape[1:]) if shape else (), dtype)
        row = math.prod(shape[1:]) * dtype.itemsize
        self._fill(name, begin * row, array.reshape(-1).view(np.uint8).data)
        return array

    def slices(
        self, name: str, wanted: Sequence[blocks.Spans], dtype: Any, check: blocks.Check
    ) -> list[np.ndarray]:
        """Slices of a tensor, cast to a type; `check` is shown each block that they lie in (`blocks.read_slices`).

        Raises:
          StoreError: as `read`.
        """
        fill = functools.partial(self._fill, name)
        return blocks.read_slices(fill, self.header(name).shape, self._numpy(name), wanted, dtype, check)

    def _numpy(self, name: str) -> np.dtype:
        kind = self.header(name).dtype
        if kind not in DTYPES.values() and kind not in OTHERS:
            raise StoreError(f"tensor {name} is {kind}, which cannot be read")
        return np.dtype(OTHERS.get(kind, kind))

    def _fill(self, name: str, place: int, buffer: memoryview) -> None:
        """Puts a tensor's bytes, from a place on, into a buffer."""
        file, _, begin, end = self._tensors[name]
        if place + buffer.nbytes > end - begin:
            raise StoreError(f"tensor {name} has fewer bytes than its shape says")
        done = 0
        while done < buffer.nbytes:
            count = os.preadv(file.fileno(), [buffer[done : done + MOST_AT_ONCE]], begin + place + done)
            if not count:
                raise StoreError(f"{file.name} is truncated")
            done += count


def _stored(path: Path, file: BinaryIO) -> Iterator[tuple[str, _Stored]]:
    """The tensors of an open file, from its header, which the library has checked."""
    with _checked(path) as known:
        names = known.keys()
        size = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(size))
        for name in names:
            one = known.get_slice(name)
            kind = one.get_dtype()
            header = Header(tuple(one.get_shape()), DTYPES.get(kind, kind))
            begin, end = (8 + size + place for place in fields[name]["data_offsets"])
            yield name, _Stored(file, header, begin, end)


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


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise StoreError(f"{path} is missing") from error


def _checked(path: Path) -> Any:
    """The file as the library sees it."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
            raise StoreError(pickle_refused(path)) from error
        raise StoreError(f"{path} is truncated or not a safetensors file ({error})") from error
