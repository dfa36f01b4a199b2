"""Moves tensors between files of weights and parameter trees, both ways, as a table of rows says."""

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.disk.folders import ADAPTER_CONFIG, IS_ADAPTER, StoreError
from paradec_jax.disk.tensors import DTYPES, Lazy
from paradec_jax.io import read_object
from paradec_jax.store.model import PARAM_DTYPES

# Buffers that some programs save beside the weights and compute anew: tables of rotary positions,
# ids of positions, causal masks. A mask has the name that a bias may have too, but is of shape [1,
# 1, T, T].
ATTENTION = r"(attn|attention|self_attn)"
BUFFER = re.compile(
    rf"(.*\.)?((rot\w*|rope)\.((original_)?inv_freq|cos_cached|sin_cached)|position_ids|{ATTENTION}\.masked_bias)"
)
CAUSAL_MASK = re.compile(rf"(.*\.)?{ATTENTION}\.bias")
ROWS_AT_ONCE = 4096  # of two matrices that are compared


Json = Mapping[str, Any]  # an object of a file, such as config.json
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by their names


class ConvertError(StoreError):
    """A checkpoint that cannot be converted."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter on both sides. A tensor that feeds several parameters has a row for
    each, in their order.

    Attributes:
      path: place in the parameter tree, segments joined by "/"; `{i}` stands for the layer.
      name: name in the checkpoint; `{i}` stands for the layer.
      pattern: einops pattern from the checkpoint's layout (of the row's own part) to ours; read
        backwards for export.
      layers: how many layers there are, or None for a tensor that exists once.
      parts: how many parameters of this shape a tensor feeds, one after the other along its first
        axis.
      part: which of them this row is.
    """

    path: str
    name: str
    pattern: str
    layers: int | None = None
    parts: int = 1
    part: int = 0

    def each(self) -> Iterator[tuple[str, str]]:
        """Path and name of each layer's parameter."""
        for i in range(1 if self.layers is None else self.layers):
            yield self.path.replace("{i}", str(i)), self.name.replace("{i}", str(i))

    def stored_shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor, given the length of every axis that patterns name."""
        groups = re.findall(r"\([^)]*\)|\S+", self.pattern.split("->")[0])
        size, *others = (_product(group, axes) for group in groups)
        return self.parts * size, *others

    def shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(_product(axis, axes) for axis in self.pattern.split("->")[1].split())

    def share(self, axes: Mapping[str, int]) -> slice:
        """The parameter's share of the tensor's first axis."""
        size = self.stored_shape(axes)[0] // self.parts
        return slice(self.part * size, (self.part + 1) * size)

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


def fused(paths: Sequence[str], name: str, pattern: str) -> list[Row]:
    """The rows of a tensor that feeds several parameters of one shape."""
    return [Row(path, name, pattern, None, len(paths), i) for i, path in enumerate(paths)]


def columns(table: str, count: int = -1) -> list[list[str]]:
    """The words of each line of a table, the last of `count` + 1 columns with its blanks."""
    return [line.split(maxsplit=count) for line in table.strip().splitlines()]


def rows_of(table: str) -> list[Row]:
    """The rows of a table of paths, names and patterns."""
    return [Row(path, name, pattern) for path, name, pattern in columns(table, 2)]


def layered(block: Sequence[Row], layers: int, path: str, name: str) -> list[Row]:
    """The rows of layers, from those of one; a layer's paths and names begin with `path`, `name`."""

    def placed(row: Row) -> Row:
        place, stored = f"{path}_{{i}}/{row.path}", f"{name}.{{i}}.{row.name}"
        return dataclasses.replace(row, path=place, name=stored, layers=layers)

    return [placed(row) for row in block]


Table = tuple[Mapping[str, int], Sequence[Row]]  # lengths of the axes that patterns name, and rows


def table_shapes(table: Table) -> Shapes:
    """Names and shapes of all tensors of a table."""
    axes, rows = table
    return {name: row.stored_shape(axes) for row in rows for _, name in row.each()}


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint by their names in the table, read one at a time.

    Attributes:
      folder: path that error messages name.
      tensors: the tensors.
    """

    folder: Path
    tensors: Mapping[str, Lazy]

    def read(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return np.asarray(self.tensors[name])

    def missing(self, name: str) -> ConvertError:
        """The error of a tensor that is not there; it names one that differs in its prefix alone."""
        near = [one for one in self.tensors if one.endswith(f".{name}") or name.endswith(f".{one}")]
        held = f", and it holds {near[0]}" if near else ""
        return ConvertError(
            f"tensor {name} is missing from {self.folder}, although config.json asks for it{held}"
        )


def note(sentence: str) -> None:
    """Tells the user what was read otherwise than it is written."""
    print(f"note: {sentence}", file=sys.stderr)


def parted(source: Source, prefix: str) -> tuple[Source, Source]:
    """The tensors whose names do not begin with the prefix, and the others, without it."""
    without, others = dict[str, Lazy](), dict[str, Lazy]()
    for name, tensor in source.tensors.items():
        (others if name.startswith(prefix) else without)[name.removeprefix(prefix)] = tensor
    return Source(source.folder, without), Source(source.folder, others)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ConvertError: when the file is missing or holds anything else.
    """
    if not path.exists():
        adapter = path.with_name(ADAPTER_CONFIG).is_file()
        raise ConvertError(f"{path} is missing" + adapter * f": {IS_ADAPTER}")
    try:
        return read_object(path, finite=True)
    except ValueError as error:
        raise ConvertError(str(error)) from error


def read_table(
    source: Source, table: Table, dtype: str | None, optional: Shapes
) -> tuple[dict[str, Any], str]:
    """The parameter tree of a checkpoint, each parameter read when it is asked for, and their type.

    Args:
      source, table: the checkpoint, and the table of its model.
      dtype: type of the parameters; by default that of `common_dtype`.
      optional: names and shapes of tensors that may be there besides those of the table.

    Raises:
      ConvertError: naming the first tensor that is missing, unknown, misshapen or not floating
        point.
    """
    axes, rows = table
    deepest = max(row.layers or 0 for row in rows)
    if deepest > len(source.tensors):  # before the names of so many are made
        raise ConvertError(
            f"config.json asks for {deepest} layers, but {source.folder} has only {len(source.tensors)} tensors"
        )
    shapes = table_shapes(table)
    check_tensors(source, shapes, optional)
    param_dtype = dtype or common_dtype(source, list(shapes))

    def read(row: Row, name: str, index: Any) -> np.ndarray:
        stored = source.tensors[name].read(row.share(axes) if row.parts > 1 else ())
        with np.errstate(over="ignore"):  # numbers that become infinite are refused elsewhere
            return row.load(stored, axes)[index].astype(param_dtype, copy=False)

    leaves = {}
    for row in rows:
        for path, name in row.each():
            leaves[path] = Lazy(row.shape(axes), param_dtype, functools.partial(read, row, name))
    return unflatten_dict(leaves, sep="/"), param_dtype


def check_tensors(source: Source, shapes: Shapes, optional: Shapes) -> None:
    """Refuses, as `read_table`, names, shapes and types that no config asks for, but not buffers."""
    for name in sorted(shapes.keys() - source.tensors.keys()):
        raise source.missing(name)
    for name, tensor in sorted(source.tensors.items()):
        want = shapes.get(name, optional.get(name))
        if want is None:
            if is_buffer(name, tensor.shape):
                continue
            raise ConvertError(
                f"tensor {name} in {source.folder} is unknown: config.json does not ask for it"
            )
        if tensor.shape != want:
            raise ConvertError(
                f"tensor {name} has shape {tensor.shape}, but config.json asks for {want}"
            )
        if tensor.dtype not in DTYPES.values():
            known = ", ".join(DTYPES.values())
            raise ConvertError(f"tensor {name} is {tensor.dtype}, but weights must be {known}")


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is no weight but what programs compute anew: see `BUFFER` and `CAUSAL_MASK`."""
    mask = len(shape) == 4 and shape[:2] == (1, 1) and CAUSAL_MASK.fullmatch(name)
    return bool(mask or BUFFER.fullmatch(name))


def check_tied(source: Source, head: str, embedding: str, field: str) -> None:
    """Refuses a stored output matrix that differs from the embedding to which it is tied."""
    if head not in source.tensors:
        return
    both = source.tensors[head], source.tensors[embedding]
    count = both[0].shape[0]
    for begin in range(0, count, ROWS_AT_ONCE):
        rows = slice(begin, min(begin + ROWS_AT_ONCE, count))
        a, b = (tensor.read(rows).astype(np.float64) for tensor in both)
        if not np.array_equal(a, b, equal_nan=True):
            raise ConvertError(
                f"tensor {head} differs from {embedding}, although config.json ties them ({field})"
            )


def common_dtype(source: Source, names: Sequence[str]) -> str:
    """The type that loses nothing: that of all named tensors where it is one of ours, else float32.

    Raises:
      ConvertError: when a tensor is float64, of which every type of ours loses digits.
    """
    kinds = {source.tensors[name].dtype: name for name in names}
    if "float64" in kinds:
        raise ConvertError(
            f"tensor {kinds['float64']} is float64; choose one of {', '.join(PARAM_DTYPES)} with dtype"
        )
    kind, *others = kinds
    return kind if not others and kind in PARAM_DTYPES else "float32"


def export_tree(params: Mapping[str, Any], table: Table) -> dict[str, Lazy]:
    """The tensors of a checkpoint by name, made of parameters when they are asked for."""
    axes, rows = table
    leaves, shapes = flatten_dict(params, sep="/"), table_shapes(table)
    parts: dict[str, list[tuple[Row, str]]] = {}
    for row in rows:
        for path, name in row.each():
            parts.setdefault(name, []).append((row, path))

    def read(sources: list[tuple[Row, str]], index: Any) -> np.ndarray:
        dumped = [row.dump(np.asarray(leaves[path]), axes) for row, path in sources]
        return (dumped[0] if len(dumped) == 1 else np.concatenate(dumped))[index]

    return {
        name: Lazy(shapes[name], str(leaves[sources[0][1]].dtype), functools.partial(read, sources))
        for name, sources in parts.items()
    }
