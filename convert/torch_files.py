"""Files of PyTorch (its zip format), read without running what their pickles name.

::

    NAME/data.pkl    a pickle of a tree: tensors by name, and in checkpoints of Lightning the state of a run
    NAME/data/KEY    numbers of a storage, which tensors in the tree refer to by its key
    NAME/byteorder   of these numbers, "little" where it is missing

The tree of a checkpoint of Lightning (`.ckpt`) holds `state_dict`, `hyper_parameters` and `ema`.
That of a `pytorch_model.bin` is the table of tensors itself. A pickle calls functions by name.
`_Unpickler` gives it stand-ins for all of them, so nothing is imported or run.
"""

import collections
import contextlib
import functools
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from paradec_jax.disk.tensors import Lazy
from paradec_jax.io import one_sentence, regular

from .engine import ConvertError, Source

STORAGES = {  # by their names in PyTorch
    f"{kind}Storage": np.dtype(name)
    for kind, name in {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
    }.items()
}
# Steps of a pickle: an operation is one, but a name becomes a class, and tuples of one tuple grow
# without bound.
MOST_STEPS = 10**6
NAMES = ["GLOBAL", "STACK_GLOBAL", "INST"]
TUPLES = ["TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"]
# Storages: rows of a tensor, or tensors that share one, are often read one after the other.
KEPT = 2


class Storage(NamedTuple):
    """Numbers that tensors share: their type, the name of their file, and how many there are."""

    dtype: np.dtype
    key: str
    size: int


class Tensor(NamedTuple):
    """A tensor in the tree: which numbers of which storage it shows."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Inert:
    """What stands in the tree for an object that was not made.

    Attributes:
      state: what was to be put into it.
    """

    state: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *_: Any) -> "Inert":
        return Inert()

    append = extend = add = __call__


class _Unpickler(pickle.Unpickler):
    """Reads a pickle in which every name means a tensor, a dictionary, or an inert object."""

    def find_class(self, module: str, name: str) -> Any:
        # Each stand-in is new, since a pickle may also change the attributes of what it was given.
        match module, name:
            case "collections", "OrderedDict":
                return collections.OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return lambda *arguments: _tensor(*arguments[:4])
            case "torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return lambda tensor, *_: tensor
        return type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case "storage", type(__module__="torch", __name__=kind), str(key), _, int(n) if (
                kind in STORAGES
            ):
                return Storage(STORAGES[kind], key, n)
        return Inert()


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> Tensor:
    if not isinstance(storage, Storage):
        raise ValueError("a tensor in it lies in a storage of an unknown kind")
    sizes = offset, *shape, *stride
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError("a tensor in it has no sizes")
    if math.prod(shape) > storage.size:
        raise ValueError("a tensor in it has more numbers than its storage")
    return Tensor(storage, offset, tuple(shape), tuple(stride))


def _check(data: bytes) -> None:
    """Refuses a pickle that takes more memory or time than its length explains. Raises ValueError."""
    steps, before, memo = 0, "", dict[int, str]()
    operations: Any = pickletools.genops(data)
    for operation, argument, _ in operations:
        name = operation.name
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = before
        again = name == "DUP" or ("GET" in name and memo.get(argument) in TUPLES)
        far = (name == "FRAME" or "PUT" in name) and argument > len(data)
        steps += 1 + 99 * (name in NAMES) + MOST_STEPS // 20 * again
        if far or steps > MOST_STEPS:
            raise ValueError("it takes more memory or time than its length explains")
        before = name


class Archive(contextlib.AbstractContextManager["Archive"]):
    """The tree of a file, and its numbers.

    Args:
      path: the file.

    Raises:
      ConvertError: when it is missing, damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._storage = functools.lru_cache(KEPT)(self._read_storage)
        try:
            self._zip = zipfile.ZipFile(regular(path))
        except Exception as error:  # what is damaged raises errors of many kinds
            raise ConvertError(
                f"{path} is missing, damaged or not in PyTorch's zip format"
            ) from error
        try:
            self.tree = self._read_tree()
        except BaseException:
            self._zip.close()
            raise

    def _read_tree(self) -> Any:
        names = self._zip.namelist()
        if len({*names}) < len(names) or any(entry.compress_type for entry in self._zip.infolist()):
            raise ConvertError(
                f"{self.path} is a zip file, but not of PyTorch, which compresses nothing and repeats no name"
            )
        roots = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise ConvertError(f"{self.path} is a zip file, but not of PyTorch: it has no data.pkl")
        self._root = roots[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in names and self._bytes("byteorder").strip() != b"little":
            raise ConvertError(f"{self.path} holds numbers that are not little-endian")
        data = self._bytes("data.pkl")
        try:
            _check(data)
            return _Unpickler(io.BytesIO(data)).load()
        except Exception as error:  # see above
            raise ConvertError(
                f"data.pkl in {self.path} is damaged: {one_sentence(error, 99)}"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._storage.cache_clear()
        self._zip.close()

    def _bytes(self, name: str) -> bytes:
        try:
            return self._zip.read(self._root + name)
        except KeyError as error:
            raise ConvertError(
                f"{self.path} lacks {name}, although its data.pkl refers to it"
            ) from error
        except Exception as error:  # see above
            raise ConvertError(
                f"{name} in {self.path} is damaged ({one_sentence(error, 99)})"
            ) from error

    def _read_storage(self, storage: Storage) -> bytes:
        content = self._bytes(f"data/{storage.key}")
        if len(content) != storage.size * storage.dtype.itemsize:
            raise self._short(storage)
        return content

    def stored(self, tensor: Tensor) -> Lazy:
        """A tensor whose numbers are read when they are asked for, of any strides, read-only."""
        dtype = tensor.storage.dtype

        def read(index: Any) -> np.ndarray:
            steps = [step * dtype.itemsize for step in tensor.stride]
            content = self._storage(tensor.storage), tensor.offset * dtype.itemsize
            try:  # NumPy checks where they lie
                array = np.ndarray(tensor.shape, dtype, *content, steps)
            except (ValueError, TypeError, OverflowError) as error:
                raise self._short(tensor.storage) from error
            return array[index]

        return Lazy(tensor.shape, dtype.name, read)

    def _short(self, storage: Storage) -> ConvertError:
        return ConvertError(
            f"data/{storage.key} in {self.path} is not as long as its data.pkl says"
        )


def named_tensors(
    archive: Archive, table: Any, rename: Callable[[str], str] = str
) -> dict[str, Lazy]:
    """The tensors of a table in the tree, such as a `state_dict`.

    Raises:
      ConvertError: when it is no table of tensors, or two of its names are one.
    """
    if not isinstance(table, dict) or not table:
        raise ConvertError(f"{archive.path} has no table of tensors where its weights should be")
    tensors: dict[str, Lazy] = {}
    for name, tensor in table.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConvertError(
                f"{archive.path} holds {name!r:.60} among its weights, which is not a named tensor"
            )
        plain = rename(name)
        if plain in tensors:
            raise ConvertError(f"tensor {plain} occurs twice in {archive.path}")
        tensors[plain] = archive.stored(tensor)
    return tensors


# Checkpoints of Lightning


def state_dict(archive: Archive, rename: Callable[[str], str]) -> Source:
    """The weights as they are trained. Raises ConvertError as `named_tensors`, or for none."""
    table = _part(archive.tree, "state_dict")
    if table is None:
        raise ConvertError(f"{archive.path} has no state_dict: not a checkpoint of Lightning")
    return Source(archive.path, named_tensors(archive, table, rename))


def averages(archive: Archive, names: Sequence[str]) -> Source:
    """The moving averages of the weights, a list without names, given in order of registration.

    Raises:
      ConvertError: when there is no such list, or it has another length.
    """
    tensors = _part(_part(archive.tree, "ema"), "shadow_params")
    if not isinstance(tensors, list) or len(tensors) != len(names):
        raise ConvertError(
            f"{archive.path} has no averages of the model's {len(names)} parameters (ema.shadow_params); import its "
            "raw weights"
        )
    return Source(archive.path, named_tensors(archive, dict(zip(names, tensors, strict=True))))


def hyper_parameters(archive: Archive) -> dict[str, Any]:
    """The settings of the training run, or their config: values, and dictionaries of values.

    {} where the checkpoint holds none.
    """
    settings = _mapping(_part(archive.tree, "hyper_parameters")) or {}

    def plain(node: Any) -> Any:
        inner = _mapping(node)
        return _value(node) if inner is None else {k: _value(one) for k, one in inner.items()}

    nodes = _mapping(settings.get("config")) or settings
    return {name: plain(node) for name, node in nodes.items()}


def _part(node: Any, name: str) -> Any:
    """What a dictionary holds under a name; None where it holds nothing, or is none."""
    return node.get(name) if isinstance(node, dict) else None


def _mapping(node: Any) -> dict[str, Any] | None:
    """A dictionary, or what a DictConfig of OmegaConf, inert here, holds; None for anything else."""
    if isinstance(node, Inert) and isinstance(node.state, dict):
        node = node.state.get("_content")
    return {k: v for k, v in node.items() if isinstance(k, str)} if isinstance(node, dict) else None


def _value(node: Any) -> Any:
    """What a node of OmegaConf holds, or a plain value; only the kind of anything else."""
    inside = node.state if isinstance(node, Inert) and isinstance(node.state, dict) else {}
    value = inside.get("_val", node)
    several = value if isinstance(value, list) else [value]
    plain = all(one is None or isinstance(one, str | int | float) for one in several)
    return value if plain else f"<{type(value).__name__}>"
