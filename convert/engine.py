"""Moves tensors between safetensors files and parameter trees, both ways, as a table of rows says."""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.disk import description
from paradec_jax.disk.blocks import BLOCK
from paradec_jax.disk.tensors import DTYPES, Lazy
from paradec_jax.io import read_object
from paradec_jax.store import Model

# Buffers that some programs save beside the weights and compute anew: tables of rotary positions, ids of positions,
# causal masks. A mask has the name that a bias may have too, but is of shape [1, 1, T, T].
ATTENTION = r"(attn|attention|self_attn)"
BUFFER = re.compile(
    rf"(.*\.)?((rot\w*|rope)\.((original_)?inv_freq|cos_cached|sin_cached)|position_ids|{ATTENTION}\.masked_bias)"
)
CAUSAL_MASK = re.compile(rf"(.*\.)?{ATTENTION}\.bias")
MOST_WRAPPERS = 4  # parts of a prefix that is looked for


class ConvertError(ValueError):
    """A checkpoint that cannot be converted."""


class Piece(NamedTuple):
    """What one tensor of the checkpoint and one parameter have in common.

    Attributes:
      name: the tensor's name.
      place: index of the parameter that gives the piece.
      rows: the piece's share of the tensor's first axis.
    """

    name: str
    place: tuple[Any, ...]
    rows: slice


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter on both sides. A tensor that feeds several parameters has a row for each.

    Attributes:
      path: place in the parameter tree, segments joined by "/"; `{i}` stands for the layer.
      name: name in the checkpoint; `{i}` stands for the layer.
      pattern: einops pattern from the checkpoint's layout (of the row's own part) to ours; read backwards for export.
      layers: how many layers there are, or None for a tensor that exists once. Layers whose path has no `{i}`
        are stacked on a new leading axis.
      parts: where a tensor feeds several parameters, what follows each other along its first axis, as products of
        axes ("h c").
      part: which of them this row is.
    """

    path: str
    name: str
    pattern: str
    layers: int | None = None
    parts: tuple[str, ...] = ()
    part: int = 0

    def shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the checkpoint, given the length of every axis that patterns name."""
        groups = re.findall(r"\([^)]*\)|\S+", self.pattern.split("->")[0])
        shape = tuple(_product(group, axes) for group in groups)
        if self.parts:
            shape = (sum(_product(part, axes) for part in self.parts), *shape[1:])
        return {piece.name: shape for _, _, pieces in self.leaves(axes) for piece in pieces}

    def leaves(self, axes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
        """Path and shape of each parameter, and the tensors that it is made of."""
        shape = tuple(_product(axis, axes) for axis in self.pattern.split("->")[1].split())
        ends = [0, *itertools.accumulate(_product(part, axes) for part in self.parts)]
        rows = slice(*ends[self.part : self.part + 2]) if self.parts else slice(None)
        if self.layers is None:
            yield self.path, shape, [Piece(self.name, (...,), rows)]
            return
        names = [self.name.replace("{i}", str(i)) for i in range(self.layers)]
        if "{i}" in self.path:
            for i, name in enumerate(names):
                yield self.path.replace("{i}", str(i)), shape, [Piece(name, (...,), rows)]
        else:
            pieces = [Piece(name, (i, ...), rows) for i, name in enumerate(names)]
            yield self.path, (self.layers, *shape), pieces

    def load(self, tensor: np.ndarray, axes: Mapping[str, int]) -> np.ndarray:
        """Checkpoint's layout to ours."""
        return rearrange(tensor, self.pattern, **self._used(axes))

    def dump(self, leaf: np.ndarray, axes: Mapping[str, int]) -> np.ndarray:
        """Our layout to the checkpoint's."""
        source, target = self.pattern.split("->")
        return rearrange(leaf, f"{target.strip()} -> {source.strip()}", **self._used(axes))

    def _used(self, axes: Mapping[str, int]) -> dict[str, int]:
        return {name: axes[name] for name in re.findall(r"[a-z]+", self.pattern)}


def _product(group: str, axes: Mapping[str, int]) -> int:
    """Length of one axis of a pattern: a name, a number, or several in parentheses."""
    return math.prod(axes.get(axis) or int(axis) for axis in group.strip("()").split())


def table_shapes(rows: Sequence[Row], axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a table."""
    return {name: shape for row in rows for name, shape in row.shapes(axes).items()}


@runtime_checkable
class Source(Protocol):
    """Where tensors of a checkpoint are read, one at a time, by their names in the table."""

    folder: Path

    @property
    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray: ...


class Part:
    """Some tensors of a source as a source of their own.

    Args:
      whole: the source.
      stored: the name in it of each tensor of the part.
    """

    def __init__(self, whole: Source, stored: Mapping[str, str]) -> None:
        self.folder, self._whole, self._stored = whole.folder, whole, stored

    @property
    def names(self) -> set[str]:
        """Names of the tensors of the part."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._whole.shape(self._stored[name])

    def dtype(self, name: str) -> str:
        """Type of a tensor."""
        return self._whole.dtype(self._stored[name])

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor itself, or these rows of it."""
        return self._whole.read(self._stored[name], rows)


def parted(source: Source, prefix: str) -> tuple[Part, Part]:
    """The tensors whose names do not begin with the prefix, and the others under the rest of their names."""
    others = {name.removeprefix(prefix): name for name in source.names if name.startswith(prefix)}
    return Part(source, {name: name for name in source.names - set(others.values())}), Part(source, others)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ConvertError: when the file is missing or holds anything else.
    """
    if not path.is_file():
        raise ConvertError(f"{path} is missing")
    try:
        return read_object(path)
    except ValueError as error:
        raise ConvertError(str(error)) from error


def check_tensors(checkpoint: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the names and shapes of a checkpoint with those that its config asks for, without saved buffers.

    Raises:
      ConvertError: naming the first tensor that is missing, unknown or misshapen, or the prefix of all names.
    """
    check_prefix(checkpoint, shapes)
    for name in sorted(shapes.keys() - checkpoint.names):
        raise ConvertError(
            f"tensor {name} is missing from {checkpoint.folder}, although config.json asks for it"
        )
    for name in sorted(checkpoint.names - shapes.keys()):
        if not is_buffer(name, checkpoint.shape(name)):
            raise ConvertError(
                f"tensor {name} in {checkpoint.folder} is unknown: config.json does not ask for it"
            )
    for name, shape in sorted(shapes.items()):
        if checkpoint.shape(name) != shape:
            raise ConvertError(
                f"tensor {name} has shape {checkpoint.shape(name)}, but config.json asks for {shape}"
            )


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is no weight but what programs compute anew: see `BUFFER` and `CAUSAL_MASK`."""
    mask = len(shape) == 4 and shape[:2] == (1, 1) and CAUSAL_MASK.fullmatch(name)
    return bool(mask or BUFFER.fullmatch(name))


def check_prefix(checkpoint: Source, wanted: Collection[str]) -> None:
    """Refuses names that begin with a part too much, as wrappers of a model add it, or with one too few.

    Raises:
      ConvertError: naming the part.
    """
    missing, unknown = set(wanted) - checkpoint.names, checkpoint.names - set(wanted)
    for verb, longer, shorter in (("begins with", unknown, missing), ("lacks", missing, unknown)):
        fits = [(part, rest) for name in longer for part, rest in _beginnings(name) if rest in shorter]
        for part, count in Counter(part for part, _ in fits).most_common(1):
            if 2 * count > len(wanted):
                rest = min(rest for found, rest in fits if found == part)
                stored, asked = (part + rest, rest) if longer is unknown else (rest, part + rest)
                who = "every name" if count == len(checkpoint.names) else "nearly every name"
                raise ConvertError(
                    f"{who} {verb} {part!r}: {checkpoint.folder} holds {stored}, but config.json asks for {asked}"
                )


def _beginnings(name: str) -> Iterator[tuple[str, str]]:
    """A name cut after each of its first points."""
    for point in itertools.islice(re.finditer(r"\.", name), MOST_WRAPPERS):
        yield name[: point.end()], name[point.end() :]


def check_depth(checkpoint: Source, config: Any) -> None:
    """Refuses more layers than there are tensors, before the names of so many are made.

    Raises:
      StoreError: naming the field.
    """
    description.check_layers(config, len(checkpoint.names))


def check_tied(checkpoint: Source, head: str, embedding: str, field: str) -> None:
    """A stored output matrix equals the embedding that config.json puts in its place.

    Raises:
      ConvertError: when any number differs.
    """
    if head not in checkpoint.names:
        return
    shape = checkpoint.shape(embedding)
    same = True
    rows = max(BLOCK // max(8 * math.prod(shape[1:]), 1), 1)  # of at most 8 bytes a number
    for begin in range(0, shape[0], rows):
        a, b = (checkpoint.read(name, slice(begin, begin + rows)) for name in (head, embedding))
        if a.dtype != b.dtype:
            a, b = a.astype(np.float64), b.astype(np.float64)
        same &= np.array_equal(a.view(np.uint8), b.view(np.uint8))
    if not same:
        raise ConvertError(
            f"tensor {head} differs from {embedding}, although config.json ties them ({field})"
        )


def common_dtype(checkpoint: Source, names: Sequence[str]) -> str:
    """The type of parameters that loses nothing: that of all named tensors where it is one of ours, else float32.

    Raises:
      ConvertError: when a tensor is not floating point, or is float64, of which every type of ours loses digits.
    """
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(checkpoint.dtype(name), name)
    for kind, name in kinds.items():
        _check_floating(name, kind)
        if kind == "float64":
            raise ConvertError(
                f"tensor {name} is {kind}; choose one of {', '.join(description.DTYPES)} with --dtype"
            )
    kind = next(iter(kinds))
    return kind if len(kinds) == 1 and kind in description.DTYPES else "float32"


def _check_floating(name: str, kind: str) -> None:
    if kind not in DTYPES.values():
        raise ConvertError(f"tensor {name} is {kind}, but weights must be {', '.join(DTYPES.values())}")


def import_tree(
    checkpoint: Source, rows: Sequence[Row], axes: Mapping[str, int], dtype: str
) -> dict[str, Any]:
    """The parameter tree of a checkpoint whose names and shapes were checked; each is read when it is indexed.

    Raises:
      ConvertError: when a tensor is not floating point.
    """

    def read(row: Row, shape: tuple[int, ...], pieces: Sequence[Piece], place: Any) -> np.ndarray:
        if len(pieces) == 1 and pieces[0].place == (...,):
            return row.load(checkpoint.read(pieces[0].name, pieces[0].rows), axes)[place]
        stacked = np.empty(shape, dtype)
        for piece in pieces:
            with np.errstate(over="ignore"):  # what becomes infinite is refused when it is written
                stacked[piece.place] = row.load(checkpoint.read(piece.name, piece.rows), axes)
        return stacked[place]

    leaves = {}
    for row in rows:
        for path, shape, pieces in row.leaves(axes):
            for piece in pieces:
                _check_floating(piece.name, checkpoint.dtype(piece.name))
            leaves[path] = Lazy(shape, np.dtype(dtype), functools.partial(read, row, shape, pieces))
    return unflatten_dict(leaves, sep="/")


def export_tree(params: Mapping[str, Any], rows: Sequence[Row], axes: Mapping[str, int]) -> dict[str, Lazy]:
    """The tensors of a checkpoint by name, made of parameters (`Lazy` ones too) when they are indexed."""
    leaves = flatten_dict(params, sep="/")
    shapes = table_shapes(rows, axes)
    parts: dict[str, list[tuple[Row, str, tuple[Any, ...]]]] = {}
    for row in rows:
        for path, _, pieces in row.leaves(axes):
            for piece in pieces:
                parts.setdefault(piece.name, []).append((row, path, piece.place))

    def read(sources: list[tuple[Row, str, tuple[Any, ...]]], place: Any) -> np.ndarray:
        sources = sorted(sources, key=lambda source: source[0].part)
        dumped = [row.dump(np.asarray(leaves[path][at]), axes) for row, path, at in sources]
        return (dumped[0] if len(dumped) == 1 else np.concatenate(dumped))[place]

    return {
        name: Lazy(shapes[name], leaves[sources[0][1]].dtype, functools.partial(read, sources))
        for name, sources in parts.items()
    }


def in_memory(reading: contextlib.AbstractContextManager[Model]) -> Model:
    """The model that a converter reads, its parameters as NumPy arrays; without a head."""
    with reading as model:
        params = jax.tree.map(lambda leaf: leaf[...], model.params)
        return dataclasses.replace(model, params=params, head=None)
