"""Whether the processes of a run see one folder, which a wrong mount or working directory gives each alone."""

import contextlib
import os
import uuid
from pathlib import Path

import jax

from paradec_jax.io import one_sentence
from paradec_jax.train.agree import texts_of_all

_NAME = "seen"


def clear_probes(folder: Path) -> None:
    """Removes what processes that were killed in `check_shared` left; the holder of the folder calls it."""
    for probe in folder.glob(f".{_NAME}.*"):
        with contextlib.suppress(OSError):
            probe.unlink()


def check_shared(folder: Path) -> None:
    """Refuses a folder that is not the same for all processes, or that one cannot write; nothing for one process.

    Each writes a file of its own there, tells its name, looks for that of process 0, and removes its own. Orbax waits
    for ever for what a process wrote in a folder that the others do not see.

    Raises:
      OSError: in every process the same sentence, of the first that does not see the folder of process 0, or cannot
        write there.
    """
    if jax.process_count() == 1:
        return
    process, probe = jax.process_index(), folder / f".{_NAME}.{uuid.uuid4().hex}"
    try:
        wrong = _written(probe)
        first = texts_of_all(probe.name)[0]
        if process and not os.path.exists(folder / first):  # `Path.exists` raises where it may not look
            wrong = (
                f"does not see the folder of process 0: {folder} must be one that all share, on a file system of all "
                "machines and from the same working directory"
            )
        told = texts_of_all("" if wrong is None else f"process {process} {wrong}")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    for sentence in told:
        if sentence:
            raise OSError(one_sentence(sentence))


def _written(path: Path) -> str | None:
    """What is wrong with writing there, or None. What a former run made there must take more, too."""
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        return f"cannot write {path.parent} ({error.strerror}): choose another folder"
    checkpoints = path.parent / "checkpoints"
    if checkpoints.exists() and not os.access(checkpoints, os.W_OK):
        return f"cannot write {checkpoints}: choose another folder"
    return None
