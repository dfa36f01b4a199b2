"""The weights of a Hugging Face folder: safetensors or files of PyTorch, or shards of either."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paradec_jax.disk.tensors import Lazy, open_tensors, write_tensors

from .engine import ConvertError, Source, note, read_json
from .fields import write_json
from .torch_files import Archive, named_tensors

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = f"{SAFETENSORS}.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
Rename = Callable[[str], str]

# What programs put before names of tensors: wrappers around a module, and modules that hold a model
# and nothing more.
WRAPPER = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
HOLDER = re.compile(
    r"^(?:base_model\.|model\.)*(?=(embed_tokens|layers|norm|transformer|lm_head)\.)"
)


def plain_name(name: str) -> str:
    """The name of a tensor in the layout of transformers: `model.` once before all but the head."""
    return HOLDER.sub(lambda held: "" if held[1] == "lm_head" else "model.", WRAPPER.sub("", name))


@contextlib.contextmanager
def opened(folder: Path, rename: Rename = plain_name, prefix: str = "") -> Iterator[Source]:
    """The tensors of a folder, read one at a time. What was saved twice counts once, as in
    transformers.

    Args:
      folder: path of the folder.
      rename: a stored name -> the name that it is known by; one line tells the user that names
        differ.
      prefix: beginning of names that the layout has and `rename` takes away.

    Raises:
      ConvertError: when there is no file of weights, a file of PyTorch's is damaged, or a name
        occurs twice.
      StoreError: when another file is missing or damaged.
    """
    files = _files(folder)
    tensors: dict[str, Lazy] = {}
    other = None  # a name that is not the layout's
    with contextlib.ExitStack() as archives:
        for path, promised in files.items():
            if path.suffix == ".safetensors":
                stored: Mapping[str, Lazy] = open_tensors(path)
            else:
                archive = archives.enter_context(Archive(path))
                stored = named_tensors(archive, archive.tree)
            for name in sorted(set(promised) - stored.keys()):
                raise ConvertError(
                    f"tensor {name} is listed in an index, but {path} does not hold it"
                )
            for name, tensor in stored.items():
                plain = rename(name)
                if plain in tensors:
                    raise ConvertError(f"tensor {plain} occurs twice in {folder}")
                tensors[plain] = tensor
                if name not in (plain, prefix + plain):
                    other = name
        if other is not None:
            note(
                f"{folder}: prefixes that carry nothing are passed over; {other} is read as {rename(other)}"
            )
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
            raise ConvertError(
                f"{path} is a pickle, which is never unpickled; convert it to safetensors"
            )
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
        sizes = [
            math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors.values()
        ]
        placed = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": placed})
