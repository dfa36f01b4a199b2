"""The weights of a Hugging Face folder: safetensors, or else files of PyTorch, whole or in shards with an index."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paradec_jax.disk.tensors import Lazy, open_tensors, write_tensors

from .engine import ConvertError, Source, read_json
from .torch_files import Archive, named_tensors

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = f"{SAFETENSORS}.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
Rename = Callable[[str], str]


@contextlib.contextmanager
def opened(folder: Path, rename: Rename = lambda name: name) -> Iterator[Source]:
    """The tensors of a folder, read one at a time. What was saved twice counts once, as in transformers.

    Args:
      folder: path of the folder.
      rename: a stored name -> the name that it is known by.

    Raises:
      ConvertError: when there is no file of weights, a file of PyTorch's is damaged, or a name occurs twice.
      StoreError: when another file is missing or damaged.
    """
    files = _files(folder)
    tensors: dict[str, Lazy] = {}
    with contextlib.ExitStack() as archives:
        for path, promised in files.items():
            if path.suffix == ".safetensors":
                stored: Mapping[str, Lazy] = open_tensors(path)
            else:
                archive = archives.enter_context(Archive(path))
                stored = named_tensors(archive, archive.tree, lambda name: name)
            for name in sorted(set(promised) - stored.keys()):
                raise ConvertError(f"tensor {name} is listed in an index, but {path} does not hold it")
            for name, tensor in stored.items():
                if rename(name) in tensors:
                    raise ConvertError(f"tensor {rename(name)} occurs twice in {folder}")
                tensors[rename(name)] = tensor
        yield Source(folder, tensors)


def _files(folder: Path) -> Mapping[Path, Sequence[str]]:
    """The files of the weights, each with the names that an index promises."""
    for name in (SAFETENSORS, TORCH):
        if (folder / name).is_file():
            return {folder / name: []}
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _listed_in(index)
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            raise ConvertError(f"{path} is a pickle, which is never unpickled; convert it to safetensors")
    raise ConvertError(f"{folder} has neither {SAFETENSORS} nor {TORCH}, nor an index of either")


def _listed_in(index: Path) -> dict[Path, list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(f"{index} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConvertError(f"{index} places tensor {name} in {file!r}, which is no file name")
        files.setdefault(index.parent / file, []).append(name)
    for path in files:
        if not path.is_file():
            raise ConvertError(f"shard {path} is missing, although {index.name} lists it")
    return files


def write_weights(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Writes model.safetensors, or shards and their index."""
    files = write_tensors(folder, "model", tensors)
    if len(files) > 1:
        sizes = [math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors.values()]
        placed = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
