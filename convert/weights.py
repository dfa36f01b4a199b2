"""The weights of a Hugging Face folder: safetensors, or else files of PyTorch, whole or in shards with an index."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.engine import ConvertError, Source
from convert.torch_files import Archive, Tensors, named_tensors
from paradec_jax.disk import tensors
from paradec_jax.disk.tensors import TensorFiles, listed_in, pickle_refused

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
INDEX = f"model{tensors.INDEX}"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Checkpoint(TensorFiles):
    """Tensors of safetensors files of a folder.

    Args:
      folder: the folder.
      listed: the files, each with the names that an index promises.
      rename: what a stored name is known by.

    Raises:
      StoreError: when a file is missing, truncated, not safetensors, or a name occurs twice.
    """

    def __init__(
        self, folder: Path, listed: Mapping[Path, Sequence[str]], rename: Callable[[str], str]
    ) -> None:
        self.folder = folder
        super().__init__(listed, rename)

    def __enter__(self) -> "Checkpoint":
        return self


@contextlib.contextmanager
def opened(folder: Path, rename: Callable[[str], str] = lambda name: name) -> Iterator[Source]:
    """The tensors of a folder, read one at a time. What was saved twice counts once, as in transformers.

    Args:
      folder: the folder.
      rename: what a stored name is known by.

    Raises:
      ConvertError: when there is no file of weights, or one of PyTorch's is damaged.
      StoreError: when another is missing or damaged, or a name occurs twice.
    """
    with contextlib.ExitStack() as files:
        for name, index in ((SAFETENSORS, INDEX), (TORCH, f"{TORCH}.index.json")):
            if (folder / name).is_file():
                listed: Mapping[Path, Sequence[str]] = {folder / name: []}
            elif (folder / index).is_file():
                listed = listed_in(folder / index)
            else:
                continue
            if name == SAFETENSORS:
                yield files.enter_context(Checkpoint(folder, listed, rename))
            else:
                yield _of_torch(folder, listed, rename, files)
            return
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            raise ConvertError(pickle_refused(path))
    raise ConvertError(f"{folder} has neither {SAFETENSORS} nor {TORCH}, nor an index of either")


def _of_torch(
    folder: Path,
    listed: Mapping[Path, Sequence[str]],
    rename: Callable[[str], str],
    files: contextlib.ExitStack,
) -> Tensors:
    """The tensors of files of PyTorch, which `files` closes."""
    found: dict[str, tuple[Archive, Any]] = {}
    for path, promised in listed.items():
        archive = files.enter_context(Archive(path))
        held = named_tensors(archive, archive.tree, rename)
        for name in sorted({rename(name) for name in promised} - held.names):
            raise ConvertError(f"tensor {name} is listed in an index, but {path} does not hold it")
        for name in sorted(held.names & found.keys()):
            raise ConvertError(f"tensor {name} occurs twice in {folder}")
        found |= held.found
    return Tensors(folder, found)
