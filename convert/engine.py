"""Moves tensors between safetensors files and parameter trees, both ways, as a table of rows says."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, the name "bfloat16")
import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class ConvertError(ValueError):
    """A checkpoint that cannot be converted."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of tensor on both sides.

    Attributes:
      path: place in the parameter tree, parts joined by "/"; `{i}` stands for the layer.
      name: name in the checkpoint; `{i}` stands for the layer.
      pattern: einops pattern from the checkpoint's layout to ours; read backwards for export.
      layers: how many layers there are, or None for a tensor that exists once. Layers whose path has no `{i}`
        are stacked on a new leading axis.
    """

    path: str
    name: str
    pattern: str
    layers: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether all layers share one parameter."""
        return self.layers is not None and "{i}" not in self.path

    def names(self) -> list[str]:
        """Names in the checkpoint, in the order of layers."""
        return [self.name] if self.layers is None else [self.name.format(i=i) for i in range(self.layers)]

    def leaves(self) -> Iterator[tuple[str, list[str]]]:
        """Each parameter's path with the names of the tensors that it is made of."""
        if self.layers is None or self.stacked:
            yield self.path, self.names()
        else:
            yield from ((self.path.format(i=i), [name]) for i, name in enumerate(self.names()))

    def shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape in the checkpoint, given the length of every axis that patterns name."""
        groups = re.findall(r"\([^)]*\)|\S+", self.pattern.split("->")[0])
        return tuple(math.prod(axes.get(a) or int(a) for a in group.strip("()").split()) for group in groups)

    def load(self, tensor: np.ndarray, axes: Mapping[str, int]) -> np.ndarray:
        """Checkpoint's layout to ours."""
        return rearrange(tensor, self.pattern, **self._used(axes))

    def dump(self, leaf: np.ndarray, axes: Mapping[str, int]) -> np.ndarray:
        """Our layout to the checkpoint's."""
        source, target = self.pattern.split("->")
        return rearrange(leaf, f"{target.strip()} -> {source.strip()}", **self._used(axes))

    def _used(self, axes: Mapping[str, int]) -> dict[str, int]:
        return {name: axes[name] for name in re.findall(r"[a-z]+", self.pattern)}


class Checkpoint:
    """Tensors of a Hugging Face folder (one safetensors file, or shards with an index), read one at a time.

    Args:
      folder: the folder.
      prefix: optional start of names, dropped where present.

    Raises:
      ConvertError: when a file is missing, truncated, not safetensors, or a name occurs twice.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self._tensors: dict[str, tuple[Any, str]] = {}
        self._files: list[Any] = []
        listed = _files(folder)
        for path in listed:
            file = _open(path)
            self._files.append(file)
            for stored in file.keys():  # noqa: SIM118  (not a mapping)
                name = stored.removeprefix(prefix)
                if name in self._tensors:
                    raise ConvertError(f"tensor {name} occurs twice in {folder}")
                self._tensors[name] = file, stored
        for path, names in listed.items():
            for name in names:
                if name.removeprefix(prefix) not in self._tensors:
                    raise ConvertError(f"tensor {name} is listed in {INDEX}, but {path} does not hold it")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, value, trace)

    @property
    def names(self) -> set[str]:
        """Names of all tensors, without the prefix."""
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

    def read(self, name: str) -> np.ndarray:
        """The tensor itself."""
        file, stored = self._tensors[name]
        return file.get_tensor(stored)


def _files(folder: Path) -> dict[Path, list[str]]:
    """Files to open, each with the names that an index promises."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConvertError(f"{folder / INDEX} has no weight_map")
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConvertError(
                    f"{folder / INDEX} places tensor {name} in {file!r}, which is no file name"
                )
            files.setdefault(folder / file, []).append(name)
        for path in files:
            if not path.is_file():
                raise ConvertError(f"shard {path} is missing, although {INDEX} lists it")
        return files
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": []}
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            raise refuse_pickle(path)
    raise ConvertError(f"{folder} has neither model.safetensors nor {INDEX}")


def refuse_pickle(path: Path) -> ConvertError:
    """The error for a pickle file."""
    return ConvertError(f"{path} is a pickle, which is never unpickled; convert it to safetensors")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        if _magic(path).startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
            raise refuse_pickle(path) from error
        raise ConvertError(f"{path} is truncated or not a safetensors file ({error})") from error


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ConvertError: when the file is missing or holds anything else.
    """
    if not path.is_file():
        raise ConvertError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConvertError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConvertError(f"{path} must hold one JSON object")
    return value


def check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the names and shapes of a checkpoint with those that its config asks for.

    Raises:
      ConvertError: naming the first tensor that is missing, unknown or misshapen.
    """
    for name in sorted(shapes.keys() - checkpoint.names):
        raise ConvertError(
            f"tensor {name} is missing from {checkpoint.folder}, although config.json asks for it"
        )
    for name in sorted(checkpoint.names - shapes.keys()):
        raise ConvertError(
            f"tensor {name} in {checkpoint.folder} is unknown: config.json does not ask for it"
        )
    for name, shape in sorted(shapes.items()):
        if checkpoint.shape(name) != shape:
            raise ConvertError(
                f"tensor {name} has shape {checkpoint.shape(name)}, but config.json asks for {shape}"
            )


def common_dtype(checkpoint: Checkpoint, names: Sequence[str], allowed: Sequence[str]) -> str:
    """The type that all named tensors share.

    Raises:
      ConvertError: when they differ, or their type is not an allowed one.
    """
    first = checkpoint.dtype(names[0])
    for name in names:
        kind = checkpoint.dtype(name)
        if kind != first:
            raise ConvertError(f"tensor {name} is {kind}, but {names[0]} is {first}; choose one with --dtype")
        if kind not in allowed:
            raise ConvertError(f"tensor {name} is {kind}; choose one of {', '.join(allowed)} with --dtype")
    return first


def import_tree(
    checkpoint: Checkpoint, rows: Sequence[Row], axes: Mapping[str, int], dtype: str
) -> dict[str, Any]:
    """The parameter tree of a checkpoint whose names and shapes were checked.

    Raises:
      ConvertError: when a tensor is not floating point.
    """

    def read(row: Row, name: str) -> np.ndarray:
        if checkpoint.dtype(name) not in DTYPES.values():
            raise ConvertError(f"tensor {name} is {checkpoint.dtype(name)}, which is not floating point")
        return row.load(checkpoint.read(name).astype(dtype, copy=False), axes)

    leaves = {}
    for row in rows:
        for path, names in row.leaves():
            parts = [read(row, name) for name in names]
            leaves[path] = np.stack(parts) if row.stacked else np.ascontiguousarray(parts[0])
    return unflatten_dict(leaves, sep="/")


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tensor to be written: its size in bytes, and how to make it."""

    nbytes: int
    make: Callable[[], np.ndarray]


def export_tree(params: Mapping[str, Any], rows: Sequence[Row], axes: Mapping[str, int]) -> dict[str, Lazy]:
    """The tensors of a checkpoint by name, made from a parameter tree one at a time when written."""
    leaves = flatten_dict(params, sep="/")
    tensors: dict[str, Lazy] = {}
    for row in rows:
        for path, names in row.leaves():
            parts = leaves[path] if row.stacked else [leaves[path]]
            for name, part in zip(names, parts, strict=True):
                tensors[name] = Lazy(part.nbytes, functools.partial(row.dump, part, axes))
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, Lazy], max_shard_bytes: int) -> None:
    """Writes one safetensors file, or shards of at most `max_shard_bytes` (or one tensor) and their index."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in sorted(tensors):
        if tensors[name].nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensors[name].nbytes
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", tensors, shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, tensors, names)
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(path: Path, tensors: Mapping[str, Lazy], names: Sequence[str]) -> None:
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that only their owner can read
    arrays = {name: np.ascontiguousarray(tensors[name].make()) for name in names}
    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)
