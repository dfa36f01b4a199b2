"""The weights of a Hugging Face folder: safetensors, or else files of PyTorch, whole or in shards with an index."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from convert.engine import ConvertError, Source, Stored
from convert.torch_files import Archive, named_tensors
from paradec_jax.disk import tensors
from paradec_jax.disk.tensors import TensorFiles, listed_in, pickle_refused

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = f"model{tensors.INDEX}"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
Listed = Mapping[Path, Sequence[str]]  # files, each with the names that an index promises
Rename = Callable[[str], str]


@contextlib.contextmanager
def opened(folder: Path, rename: Rename = lambda name: name) -> Iterator[Source]:
    """The tensors of a folder, read one at a time. What was saved twice counts once, as in transformers.

    Args:
      folder: the folder.
      rename: what a stored name is known by.

    Raises:
      ConvertError: when there is no file of weights, or one of PyTorch's is damaged.
      StoreError: when another is missing or damaged, or a name occurs twice.
    """
    for name, index, of_files in (
        (SAFETENSORS, INDEX, of_safetensors),
        (TORCH, f"{TORCH}.index.json", of_torch),
    ):
        if (folder / name).is_file() or (folder / index).is_file():
            listed: Listed = {folder / name: []} if (folder / name).is_file() else listed_in(folder / index)
            with of_files(folder, listed, rename) as source:
                yield source
            return
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            raise ConvertError(pickle_refused(path))
    raise ConvertError(f"{folder} has neither {SAFETENSORS} nor {TORCH}, nor an index of either")


@contextlib.contextmanager
def of_safetensors(folder: Path, listed: Listed, rename: Rename = lambda name: name) -> Iterator[Source]:
    """The tensors of safetensors files."""
    with TensorFiles(listed, rename) as files:
        yield Source(
            folder,
            {name: Stored(*files.header(name), functools.partial(files.read, name)) for name in files.names},
        )


@contextlib.contextmanager
def of_torch(folder: Path, listed: Listed, rename: Rename) -> Iterator[Source]:
    """The tensors of files of PyTorch."""
    found: dict[str, Stored] = {}
    with contextlib.ExitStack() as files:
        for path, promised in listed.items():
            archive = files.enter_context(Archive(path))
            held = named_tensors(archive, archive.tree, rename)
            for name in sorted({rename(name) for name in promised} - held.keys()):
                raise ConvertError(f"tensor {name} is listed in an index, but {path} does not hold it")
            for name in sorted(held.keys() & found.keys()):
                raise ConvertError(f"tensor {name} occurs twice in {folder}")
            found |= held
        yield Source(folder, found)
