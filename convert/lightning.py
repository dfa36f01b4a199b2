"""Checkpoints of Lightning (`.ckpt`, PyTorch's zip format), read without unpickling anything.

::

    NAME/data.pkl    a pickle of the tree: `state_dict`, `hyper_parameters`, `ema` and the state of a training run
    NAME/data/KEY    numbers of a storage, which tensors in the tree refer to by its key
    NAME/byteorder   of these numbers, "little" where it is missing
"""

import dataclasses
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import ml_dtypes
import numpy as np

from convert import inert
from convert.engine import ConvertError
from convert.inert import Global, Inert, Reference
from paradec_jax.disk.blocks import BLOCK

STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in the tree: which numbers of which storage it shows."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.stride)
        if any(type(n) is not int or n < 0 for n in numbers) or len(self.shape) != len(self.stride):
            raise ValueError("a tensor in it has no sizes")

    @property
    def end(self) -> int:
        """Place after the last number that it shows."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    return Tensor(storage, offset, shape, stride)


def _inside(tensor: Any, *_: Any) -> Any:
    return tensor


KNOWN: inert.Known = {
    Global("collections", "OrderedDict"): dict,
    Global("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Global("torch._utils", "_rebuild_parameter"): _inside,
    Global("torch._utils", "_rebuild_parameter_with_state"): _inside,
}


class Archive:
    """The tree of a checkpoint, and its numbers.

    Args:
      path: the file.

    Raises:
      ConvertError: when it is missing, damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._size = path, path.stat().st_size
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise ConvertError(f"{path} is damaged or not a checkpoint in PyTorch's zip format") from error
        try:
            self.tree = self._read_tree()
        except BaseException:
            self._zip.close()
            raise

    def _read_tree(self) -> Any:
        found = [name for name in self._zip.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise ConvertError(
                f"{self.path} is a zip file, but not a checkpoint of PyTorch: it has no data.pkl"
            )
        self._root = found[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in self._zip.namelist() and self._bytes("byteorder").strip() != b"little":
            raise ConvertError(
                f"{self.path} holds numbers that are not little-endian, which is not supported"
            )
        data = self._bytes("data.pkl")
        try:
            return inert.read(bytes(data), KNOWN)
        except ValueError as error:
            raise ConvertError(f"data.pkl in {self.path} is damaged: {error}") from error

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def _bytes(self, name: str) -> bytearray:
        try:
            entry = self._zip.getinfo(self._root + name)
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self._size:
                raise ConvertError(f"{name} in {self.path} is compressed, which PyTorch never does")
            content = bytearray(entry.file_size)
            with self._zip.open(entry) as file, memoryview(content) as view:
                done = 0
                while count := cast(zipfile.ZipExtFile, file).readinto(view[done : done + BLOCK]):
                    done += count
            if done != entry.file_size:
                raise EOFError(f"it has {done} of {entry.file_size} bytes")
            return content
        except KeyError as error:
            raise ConvertError(f"{self.path} lacks {name}, although its data.pkl refers to it") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ConvertError(f"{name} in {self.path} is damaged ({error})") from error

    def dtype(self, tensor: Tensor) -> np.dtype:
        """Type of a tensor's numbers."""
        return self._storage(tensor)[0]

    def array(self, tensor: Tensor) -> np.ndarray:
        """A tensor's numbers, of any strides, not to be written to."""
        dtype, key, count = self._storage(tensor)
        content = self._bytes(f"data/{key}")
        if len(content) != count * dtype.itemsize or max(tensor.end, math.prod(tensor.shape)) > count:
            raise ConvertError(f"data/{key} in {self.path} is not as long as its data.pkl says")
        numbers = np.frombuffer(content, dtype)[tensor.offset :]
        steps = [step * dtype.itemsize for step in tensor.stride]
        return np.lib.stride_tricks.as_strided(numbers, tensor.shape, steps, writeable=False)

    def _storage(self, tensor: Tensor) -> tuple[np.dtype, str, int]:
        """Type, key and length of a tensor's storage."""
        value = tensor.storage.value if isinstance(tensor.storage, Reference) else None
        match value:
            case ("storage", Global("torch", name), str(key), _, int(count)) if name in STORAGES:
                return STORAGES[name], key, count
        raise ConvertError(f"{self.path} has a tensor in a storage of an unknown kind")


class Tensors:
    """Tensors of a checkpoint by name, as the converters' engine reads them.

    Args:
      archive: the checkpoint.
      found: its tensors by name.
    """

    def __init__(self, archive: Archive, found: dict[str, Tensor]) -> None:
        self.archive, self.found = archive, found
        self.folder = archive.path

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self.found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.found[name].shape)

    def dtype(self, name: str) -> str:
        """NumPy's name of its type."""
        return self.archive.dtype(self.found[name]).name

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor itself, or these rows of it."""
        array = self.archive.array(self.found[name])
        return array if rows == slice(None) else array[rows]


def state_dict(archive: Archive, rename: Callable[[str], str]) -> Tensors:
    """The tensors of `state_dict`: the weights as they are trained.

    Raises:
      ConvertError: when there is no `state_dict`, or two of its names are one.
    """
    tree = archive.tree
    found = tree.get("state_dict") if isinstance(tree, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConvertError(f"{archive.path} has no state_dict: not a checkpoint of Lightning")
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConvertError(f"state_dict of {archive.path} holds {name!r}, which is not a named tensor")
        plain = rename(name)
        if plain in renamed:
            raise ConvertError(f"tensor {plain} occurs twice in {archive.path}")
        renamed[plain] = tensor
    return Tensors(archive, renamed)


def averages(archive: Archive, names: Sequence[str]) -> Tensors:
    """The moving averages of the weights, an unnamed list in the order of the parameters.

    Args:
      archive: the checkpoint.
      names: of the parameters, in the order of their registration.

    Raises:
      ConvertError: when there is no such list, or it has another length.
    """
    tree = archive.tree
    ema = tree.get("ema") if isinstance(tree, dict) else None
    found = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not isinstance(found, list) or not all(isinstance(tensor, Tensor) for tensor in found):
        raise ConvertError(f"{archive.path} has no averaged weights (ema.shadow_params); import its raw ones")
    if len(found) != len(names):
        raise ConvertError(
            f"ema.shadow_params of {archive.path} has {len(found)} tensors, but the model has {len(names)} parameters"
        )
    return Tensors(archive, dict(zip(names, found, strict=True)))


def hyper_parameters(archive: Archive) -> dict[str, Any]:
    """The settings of the training run, or its config where they hold one: values, and dictionaries of values.

    {} where the checkpoint holds none.
    """
    tree = archive.tree
    found = _mapping(tree.get("hyper_parameters") if isinstance(tree, dict) else None) or {}
    found = _mapping(found.get("config")) or found
    fields: dict[str, Any] = {}
    for name, node in found.items():
        inner = _mapping(node)
        fields[name] = _value(node) if inner is None else {key: _value(one) for key, one in inner.items()}
    return fields


def _mapping(node: Any) -> dict[str, Any] | None:
    """A dictionary, or what a DictConfig of OmegaConf, inert here, holds inside; None for anything else."""
    if isinstance(node, Inert) and isinstance(node.state, dict):
        node = node.state.get("_content")
    return {k: v for k, v in node.items() if isinstance(k, str)} if isinstance(node, dict) else None


def _value(node: Any) -> Any:
    """What a node of OmegaConf holds, or a plain value; of anything else, which may be endless, its kind alone."""
    inside = node.state if isinstance(node, Inert) and isinstance(node.state, dict) else {}
    found = inside.get("_val", node)
    several = found if isinstance(found, list) else [found]
    plain = all(one is None or isinstance(one, str | int | float) for one in several)
    return found if plain else f"<{type(found).__name__}>"
