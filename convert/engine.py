"""Moves tensors between safetensors files and parameter trees, both ways, as a table of rows says."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

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


class Piece(NamedTuple):
    """One tensor of the checkpoint, and its place in a parameter.

    Attributes:
      name: the tensor's name.
      place: index of the parameter that gives the piece.
      axes: lengths of the axes of the row's pattern.
    """

    name: str
    place: tuple[Any, ...]
    axes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of tensor on both sides.

    Attributes:
      path: place in the parameter tree, segments joined by "/"; `{i}` stands for the layer.
      name: name in the checkpoint; `{i}` stands for the layer.
      pattern: einops pattern from the checkpoint's layout to ours; read backwards for export.
      layers: how many layers there are, or None for a tensor that exists once. Layers whose path has no `{i}`
        are stacked on a new leading axis.
      parts: for a parameter that joins several tensors, what `{part}` in the name stands for and the axis that
        tells the length of the pattern's axis `part`, along which they follow each other.
    """

    path: str
    name: str
    pattern: str
    layers: int | None = None
    parts: tuple[tuple[str, str], ...] = ()

    def shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the checkpoint, given the length of every axis that patterns name."""
        groups = re.findall(r"\([^)]*\)|\S+", self.pattern.split("->")[0])
        return {
            piece.name: tuple(_product(group, piece.axes) for group in groups)
            for _, _, pieces in self.leaves(axes)
            for piece in pieces
        }

    def leaves(self, axes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
        """Path and shape of each parameter, and the tensors that it is made of."""
        joined = {**axes, "part": sum(axes[length] for _, length in self.parts)}
        shape = tuple(_product(axis, joined) for axis in self._target)
        if self.layers is None:
            yield self.path, shape, self._pieces(axes, self.name, ())
        elif "{i}" in self.path:
            for i in range(self.layers):
                name = self.name.replace("{i}", str(i))
                yield self.path.replace("{i}", str(i)), shape, self._pieces(axes, name, ())
        else:
            layers = [self._pieces(axes, self.name.replace("{i}", str(i)), (i,)) for i in range(self.layers)]
            yield self.path, (self.layers, *shape), [piece for pieces in layers for piece in pieces]

    def load(self, tensor: np.ndarray, piece: Piece) -> np.ndarray:
        """Checkpoint's layout to ours."""
        return rearrange(tensor, self.pattern, **self._used(piece))

    def dump(self, leaf: np.ndarray, piece: Piece) -> np.ndarray:
        """The checkpoint's tensor out of our parameter."""
        source, target = self.pattern.split("->")
        pattern = f"{target.strip()} -> {source.strip()}"
        return rearrange(leaf[piece.place], pattern, **self._used(piece))

    @property
    def _target(self) -> list[str]:
        return self.pattern.split("->")[1].split()

    def _pieces(self, axes: Mapping[str, int], name: str, place: tuple[Any, ...]) -> list[Piece]:
        if not self.parts:
            return [Piece(name, (*place, ...), dict(axes))]
        before = (slice(None),) * self._target.index("part")
        pieces, start = [], 0
        for part, length in self.parts:
            end = start + axes[length]
            where = (*place, *before, slice(start, end))
            pieces.append(Piece(name.replace("{part}", part), where, {**axes, "part": end - start}))
            start = end
        return pieces

    def _used(self, piece: Piece) -> dict[str, int]:
        return {name: piece.axes[name] for name in re.findall(r"[a-z]+", self.pattern)}


def _product(group: str, axes: Mapping[str, int]) -> int:
    """Length of one axis of a pattern: a name, a number, or several in parentheses."""
    return math.prod(axes.get(axis) or int(axis) for axis in group.strip("()").split())


def table_shapes(rows: Sequence[Row], axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a table."""
    return {name: shape for row in rows for name, shape in row.shapes(axes).items()}


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


def check_tied(checkpoint: Checkpoint, head: str, embedding: str, field: str) -> None:
    """A stored output matrix equals the embedding that config.json puts in its place.

    Raises:
      ConvertError: when it differs in type or in any bit.
    """
    if head not in checkpoint.names:
        return
    a, b = checkpoint.read(head), checkpoint.read(embedding)
    if a.dtype != b.dtype or not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        raise ConvertError(
            f"tensor {head} differs from {embedding}, although config.json ties them ({field})"
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

    leaves = {}
    for row in rows:
        for path, shape, pieces in row.leaves(axes):
            leaves[path] = np.empty(shape, dtype)
            for piece in pieces:
                kind = checkpoint.dtype(piece.name)
                if kind not in DTYPES.values():
                    raise ConvertError(f"tensor {piece.name} is {kind}, which is not floating point")
                leaves[path][piece.place] = row.load(checkpoint.read(piece.name), piece)
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
        for path, _, pieces in row.leaves(axes):
            for piece in pieces:
                size = leaves[path][piece.place].nbytes
                tensors[piece.name] = Lazy(size, functools.partial(row.dump, leaves[path], piece))
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
