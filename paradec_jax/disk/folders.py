"""Folders that appear whole or not at all, and where models lie: at a path, bundled, or on the
Hugging Face Hub.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paradec_jax.io import HOLDER, AnyPath, hold, one_sentence, read_object, sha256_of

ASSETS = Path(__file__).parents[1] / "assets"
CHECKOUT = Path(__file__).parents[2] / "experiments"  # a folder a paper, some with `assets`

ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@(.+))?")  # org/name@revision
# In a folder that `staged` has written: digests of its files by their names, and by its own the
# mark of its run.
MARKER = ".paradec.json"
CHAT_TEMPLATE = "chat_template.jinja"
ADAPTER_CONFIG = "adapter_config.json"
IS_ADAPTER = "the folder holds an adapter; name its base model, and give the folder with --adapter"
TEXTS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = [
    f"{part}*.safetensors" for part in ("model", "network", "residual_head", "adapter_model")
]
OLD_WEIGHTS = ["pytorch_model*.bin"]  # of a repository that has no others


class StoreError(ValueError):
    """A model folder that cannot be read or written."""


@contextlib.contextmanager
def staged(folder: AnyPath, *, overwrite: bool = False, run: str | None = None) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well and vanishes when it
    does not.

    An exception at any moment, a signal's too, leaves the old folder or the new one. What a killed
    writer left beside it goes with the next write.

    Args:
      folder: path of the folder; parents are made.
      overwrite, run: as of `check_replaceable`; the folder is marked as the run's.

    Raises:
      StoreError: the folder may not be replaced.
      OSError: another process is writing it.
    """
    folder = Path(os.path.abspath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    # What is being written is marked so, in a folder of a name that nobody can guess, which nobody
    # else can enter.
    start, mine = f".{folder.name}.", {"writes": folder.name}
    scratch = Path(tempfile.mkdtemp(prefix=start, dir=folder.parent))
    new, old = scratch / "new", scratch / "old"
    try:
        with hold(scratch):  # which another takes for what a killed writer left once it is free
            for left in folder.parent.iterdir():
                ours = left.name.startswith(start) and _marker(left) == mine
                if ours and left.stat().st_uid == scratch.stat().st_uid:
                    with hold(left):
                        if (left / "old").exists() and not folder.exists():
                            (left / "old").rename(folder)
                        if {MARKER, HOLDER, "new", "old"}.issuperset(os.listdir(left)):
                            shutil.rmtree(left, ignore_errors=True)
            (scratch / MARKER).write_text(json.dumps(mine))
            check_replaceable(folder, overwrite, run)
            new.mkdir()
            yield new
            files = {path.name: sha256_of(path) for path in new.iterdir()}
            (new / MARKER).write_text(json.dumps({**files, MARKER: run}))
            check_replaceable(folder, overwrite, run)  # another may have written it meanwhile
            if (folder / MARKER).exists():  # an empty folder is replaced by the rename alone
                folder.rename(old)
            new.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(folder: Path, overwrite: bool, run: str | None = None) -> None:
    """Refuses a folder that `staged` may not replace: one with anything in it that `staged` has not
    written.

    Args:
      folder: path of the folder.
      overwrite: whether a folder that `staged` has written may be replaced.
      run: the mark that it must have then; any when None.

    Raises:
      StoreError: in one sentence.
    """
    if folder.is_symlink() or folder.is_file():
        raise StoreError(f"{folder} exists and is not a folder")
    if not any(folder.glob("*")):
        return
    if not overwrite:
        raise StoreError(f"{folder} exists; remove it or ask to overwrite it")
    if name := foreign(folder):
        raise StoreError(
            f"{folder} exists and is not a model folder as this program wrote it (see {name}), so it is not "
            "overwritten"
        )
    if run not in (None, _marker(folder).get(MARKER)):
        raise StoreError(f"{folder} exists and is not of this run, so it is not overwritten")


def _marker(folder: Path) -> dict[str, Any]:
    """What `staged` says of a folder; nothing of a link, or where it has not written it."""
    try:
        return {} if folder.is_symlink() else read_object(folder / MARKER)
    except (OSError, ValueError):
        return {}


def foreign(folder: Path) -> str | None:
    """What is in a folder, or should be, and is not as `staged` wrote it; None where all is."""
    known = _marker(folder)
    for name in {*known, *os.listdir(folder)}:
        path = folder / name
        same = name == MARKER or (path.is_file() and known.get(name) == sha256_of(path))
        if path.is_symlink() or not same:
            return name
    return None


def locate(source: AnyPath) -> Path:
    """The folder or file itself, else the bundled model of that bare name, else the copy of
    org/name[@revision].

    The copy lies in the cache of `huggingface_hub`, which brings what is missing and obeys
    HF_HUB_OFFLINE.

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


def digest_of(source: str) -> str:
    """SHA-256 of the digests of a model's files, whatever their form; notes beside them are none."""
    place, digest = locate(source), hashlib.sha256()
    for file in sorted(place.iterdir()) if place.is_dir() else [place]:
        if file.is_file() and file.name != MARKER and file.suffix not in (".md", ".txt", ""):
            digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()


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
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns="*/*")
        )

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
