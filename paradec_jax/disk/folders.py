"""Folders that appear whole or not at all, and where models lie: at a path, bundled, or on the Hugging Face Hub."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from paradec_jax.io import lock, one_sentence

ASSETS = Path(__file__).parents[1] / "assets"
CHECKOUT = Path(__file__).parents[2] / "experiments"  # a folder a paper, some with `assets`

ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@(.+))?")  # org/name@revision
CHAT_TEMPLATE = "chat_template.jinja"
ADAPTER_CONFIG = "adapter_config.json"
IS_ADAPTER = "the folder holds an adapter; name its base model, and give the folder with --adapter"
TEXTS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = [f"{part}*.safetensors" for part in ("model", "network", "residual_head", "adapter_model")]
OLD_WEIGHTS = ["pytorch_model*.bin"]  # of a repository that has no others


class StoreError(ValueError):
    """A model folder that cannot be read or written."""


@contextlib.contextmanager
def staged(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling that becomes `folder` when the block ends well and vanishes when it does not.

    An exception at any moment, a signal's too, leaves the old folder or the new one. What a killed writer left beside
    it goes with the next write.

    Raises:
      StoreError: a folder that is not empty, unless `overwrite` is set and it holds the config of a model or of an
        adapter; or another process is writing the same folder.
    """
    folder = Path(os.path.abspath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, retired = (folder.with_name(f".{folder.name}.{end}") for end in ("paradec-tmp", "paradec-old"))
    with _locked(temporary):
        try:
            # A writer that was killed after the first rename below has left the old folder as `retired`.
            if retired.exists() and not folder.exists():
                retired.rename(folder)
            shutil.rmtree(retired, ignore_errors=True)
            _refuse_existing(folder, overwrite)
            for leftover in temporary.iterdir():
                leftover.unlink()
            yield temporary
            if folder.exists():
                folder.rename(retired)
            temporary.rename(folder)
        except BaseException:
            if retired.exists() and not folder.exists():
                retired.rename(folder)
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            if folder.exists():
                shutil.rmtree(retired, ignore_errors=True)


def _refuse_existing(folder: Path, overwrite: bool) -> None:
    if folder.is_symlink() or folder.is_file():
        raise StoreError(f"{folder} exists and is not a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise StoreError(f"{folder} exists; remove it or ask to overwrite it")
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise StoreError(f"{folder} exists and is not a model folder, so it is not overwritten")


@contextlib.contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Makes a folder that this block alone writes; where the file system has no locks, nobody is refused."""
    temporary.mkdir(exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        try:
            lock(descriptor)
            # A folder that its writer has renamed meanwhile is the new model, and no longer temporary.
            if not os.path.samestat(os.stat(descriptor), os.stat(temporary)):
                raise BlockingIOError
        except BlockingIOError as error:
            raise StoreError(f"another process is writing {temporary} to replace the same folder") from error
        yield
    finally:
        os.close(descriptor)


def locate(source: str | os.PathLike[str]) -> Path:
    """The folder or file itself, else the bundled model of that bare name, else the copy of org/name[@revision].

    The copy lies in the cache of `huggingface_hub`, which brings what is missing and obeys HF_HUB_OFFLINE.

    Raises:
      StoreError: when there is none.
    """
    path, models = Path(source), bundled()
    if not str(source):
        raise StoreError("a model must have a name or a path, not ''")
    if path.exists():
        return path
    if str(source) in models:
        return models[str(source)]
    name = ON_HUB.fullmatch(str(source))
    if name and not path.parent.exists():
        return _from_hub(*name.groups())
    known = ", ".join(sorted(models))
    raise StoreError(
        f"there is no model {path}: no folder, no file, and bundled are {known} (a checkout has more)"
    )


def _from_hub(name: str, revision: str | None) -> Path:
    """The copy of a repository's configs, tokenizer and weights."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise StoreError(
            f"there is no folder {name}, and a name on the Hugging Face Hub needs the package huggingface_hub: "
            "pip install huggingface_hub"
        ) from error

    def brought(files: list[str]) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns="*/*"))

    try:
        folder = brought(TEXTS + WEIGHTS)
        folder = folder if any(folder.glob("*.safetensors")) else brought(OLD_WEIGHTS)
    except Exception as error:  # the package has no base class of its errors
        raise StoreError(
            f"there is no folder {name}, and the Hugging Face Hub does not give it: {one_sentence(error)}"
        ) from error
    if not any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        raise StoreError(
            f"{name} on the Hugging Face Hub has no config.json; a .gguf file is named by its own path"
        )
    return folder


def bundled() -> dict[str, Path]:
    """The folders of the bundled models by name; a wheel has fewer than a checkout."""
    files = [*ASSETS.glob("*/config.json"), *CHECKOUT.glob("*/assets/*/config.json")]
    return {file.parent.name: file.parent for file in files}
