"""One living holder of a run's folder."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from paradec_jax.io import NoLocks, lock

NAME = ".holder"
_OPEN: set[int] = set()


class FolderHeld(OSError):
    """Another process, or another call in this one, is writing to the folder of a run."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made if missing, belongs to this block until it ends or its process dies, however it dies.

    A file in it is locked by the system (`flock`), which knows who lives; processes forked meanwhile do not inherit
    the lock. Where the file system has no locks, nobody is refused.

    Raises:
      FolderHeld: another holds it; the sentence names its process.
      OSError: the folder, or what a former run made in it, cannot be written.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        try:
            lock(descriptor)
        except BlockingIOError:
            told = os.read(descriptor, 200).decode(errors="replace").strip()
            who = f"process {told}" if told else "another process, which has not told its number yet,"
            what = f"{who} is writing to {folder}: wait for its end, or choose another folder"
            raise FolderHeld(what) from None
        except NoLocks:
            pass
        _OPEN.add(descriptor)
        _write(descriptor, folder)
        yield
    finally:
        _OPEN.discard(descriptor)
        os.close(descriptor)


def _write(descriptor: int, folder: Path) -> None:
    """Tells who holds the folder, and finds out whether it takes what is written."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror}): make room or choose another"
        ) from error
    for path in (folder / "checkpoints", folder / "metrics.jsonl", folder / "run.json"):
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(f"{path} cannot be written: choose another folder")


def _forked() -> None:
    """A child keeps no lock of its parent alive."""
    for descriptor in _OPEN:
        os.close(descriptor)
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
