"""Files as PyTorch writes them, without PyTorch: pickles of classes that are names alone."""

import collections
import dataclasses
import io
import json
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from paradec_jax.convert.torch_files import STORAGES

KINDS = {dtype: name for name, dtype in STORAGES.items()}


def foreign(module: str, name: str, **members) -> type:
    """A class that is pickled by this module and name."""
    return type(name, (), {"__module__": module, "__qualname__": name, **members})


REBUILD = foreign("torch._utils", "_rebuild_tensor_v2")
PARAMETER = foreign("torch._utils", "_rebuild_parameter")
STORAGE_CLASSES = {name: foreign("torch", name) for name in STORAGES}
DICT_CONFIG = foreign("omegaconf.dictconfig", "DictConfig")
ANY_NODE = foreign("omegaconf.nodes", "AnyNode")
FOREIGN = (REBUILD, PARAMETER, *STORAGE_CLASSES.values(), DICT_CONFIG, ANY_NODE)


@dataclasses.dataclass(eq=False)
class Storage:
    """Numbers that tensors share."""

    numbers: np.ndarray


@dataclasses.dataclass
class Tensor:
    """A view of a storage, as a tensor is pickled."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __reduce__(self):
        view = self.storage, self.offset, self.shape, self.stride
        return REBUILD, (*view, False, collections.OrderedDict())


@dataclasses.dataclass
class Parameter:
    """A tensor with a gradient of its own."""

    tensor: Tensor

    def __reduce__(self):
        return PARAMETER, (self.tensor, True, collections.OrderedDict())


class Harmful:
    """What a real unpickler would run."""

    def __reduce__(self):
        return os.system, ("exit 3",)


def tensor(array: np.ndarray) -> Tensor:
    """A tensor alone in its storage."""
    array = np.asarray(array)
    stride = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
    return Tensor(Storage(array.reshape(-1)), 0, array.shape, stride)


def settings(values: dict[str, Any]):
    """A DictConfig of OmegaConf: each holds a parent, and values lie in nodes."""
    config = DICT_CONFIG()
    config._metadata, config._parent, config._content = {"flags": None}, None, {}
    for key, value in values.items():
        if isinstance(value, dict):
            node = settings(value)
        else:
            node = ANY_NODE()
            node._val = value
        node._parent = config
        config._content[key] = node
    return config


def named_modules() -> dict[str, types.ModuleType]:
    """Modules in which the pickler finds the classes that it writes the names of."""
    modules: dict[str, types.ModuleType] = {}
    for cls in FOREIGN:
        for part in (cls.__module__.partition(".")[0], cls.__module__):
            modules.setdefault(part, types.ModuleType(part))
        setattr(modules[cls.__module__], cls.__name__, cls)
    return modules


def pickled(tree, protocol: int = 2) -> tuple[bytes, list[np.ndarray]]:
    """The pickle of a tree, and the numbers of its storages by key."""
    storages: list[Storage] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if not isinstance(value, Storage):
                return None
            if value not in storages:
                storages.append(value)
            kind = STORAGE_CLASSES[KINDS[value.numbers.dtype]]
            return ("storage", kind, str(storages.index(value)), "cpu", value.numbers.size)

    buffer = io.BytesIO()
    with mock.patch.dict(sys.modules, named_modules()):
        Pickler(buffer, protocol).dump(tree)
    return buffer.getvalue(), [storage.numbers for storage in storages]


def write_checkpoint(path: Path, tree, *, protocol: int = 2, **replaced: bytes | None) -> Path:
    """Writes a file of PyTorch, of which `data_pkl`, `byteorder` and `data_0`, ... may be replaced,
    or left out.
    """
    data, storages = pickled(tree, protocol)
    files = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    files |= {f"data/{key}": numbers.tobytes() for key, numbers in enumerate(storages)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            key = name.replace("/", "_").replace(".", "_")
            content = replaced.get(key, content)
            if content is not None:
                archive.writestr(f"archive/{name}", content)
    return path


def nested_fields(folder: Path) -> dict[str, Any]:
    """The nested config of a folder of recorded arrays."""
    return json.loads((folder / "sdtt_config.json").read_text())
