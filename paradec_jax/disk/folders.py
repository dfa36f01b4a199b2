"""Folders that appear whole or not at all, and short names of them."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from paradec_jax.io import claimed, clear_leftovers


class StoreError(ValueError):
    """A model folder that cannot be read or written."""


def refuse_existing(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raises StoreError where writing `folder` would destroy something.

    An empty folder is free. With `overwrite`, so is one that holds a config.json.
    """
    folder = Path(folder)
    if not (folder.exists() or folder.is_symlink()):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise StoreError(f"{folder} exists and is not a folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise StoreError(f"{folder} exists; remove it or ask to overwrite it")
    if not (folder / "config.json").is_file():
        raise StoreError(f"{folder} exists and is not a model folder, so it is not overwritten")


@contextlib.contextmanager
def staged(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling that becomes `folder` when the block ends well and vanishes when it does not.

    What writers of the same folder left that were killed vanishes first.

    Raises:
      StoreError: as `refuse_existing`.
    """
    folder = Path(os.path.abspath(folder))
    clear_leftovers(folder, r"[0-9a-f]{8}\.(tmp|old)")
    refuse_existing(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)

    def make() -> Path:
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
        temporary.mkdir()
        return temporary

    with claimed(make) as temporary:
        try:
            yield temporary
            _replace(folder, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _replace(folder: Path, temporary: Path) -> None:
    """Puts `temporary` in the place of `folder`; an exception at any moment, a signal's too, leaves one of both."""
    retired = temporary.with_suffix(".old")
    try:
        if folder.exists():
            folder.rename(retired)
        temporary.rename(folder)
    except BaseException:
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        raise
    finally:
        if folder.exists():
            shutil.rmtree(retired, ignore_errors=True)


def names_of(models: Sequence[str]) -> list[str]:
    """Short names that differ: of a folder .../RUN/round-N/model the run and the round, else the last part."""
    found = []
    for model in models:
        parts = Path(model).parts
        generic = len(parts) >= 3 and parts[-1] == "model"
        found.append("/".join(parts[-3:-1]) if generic else parts[-1])
    return found if len(set(found)) == len(found) else list(models)
