"""What the processes of a run say to each other before its first update: that they do the same, or why one cannot."""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn

from paradec_jax.io import MOST_CHARACTERS, one_sentence

_ROOM = 4 * MOST_CHARACTERS  # bytes of a sentence, whose characters have at most four
_SHORT = 40
MOST_SECONDS = 24 * 3600  # that a process waits for the others
# Gloo's own faults, such as two collectives that met each other, name it too; NCCL's words are not known here.
_LOST = re.compile(
    r"gloo.*(connection (closed|reset|refused)|broken pipe|timed? ?out)"
    r"|heartbeat|coordination service|barrier timed out|UNAVAILABLE",
    re.IGNORECASE | re.DOTALL,
)


def texts_of_all(text: str) -> list[str]:
    """What each process says, by its number; of a long text the beginning. All must ask at the same place."""
    if jax.process_count() == 1:
        return [text]
    room = np.zeros(_ROOM, np.uint8)
    said = text.encode()[:_ROOM]
    room[: len(said)] = np.frombuffer(said, np.uint8)
    heard = multihost_utils.process_allgather(room)
    return [bytes(line).rstrip(b"\0").decode(errors="ignore") for line in np.asarray(heard)]


def any_of_all(flag: bool) -> bool:
    """Whether any process says so. All must ask at the same place."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


class PeerLost(OSError):
    """Another process of the run is dead or cannot be reached; the checkpoints stay."""


@contextlib.contextmanager
def telling_of_lost_peers() -> Iterator[None]:
    """A block whose collectives fail with `PeerLost` where JAX finds a process gone.

    Where a process waits for another outside of a collective, JAX ends it with SIGABRT within the heartbeat.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (lost := lost_peer(error)) is None:
            raise
        raise lost from error


def lost_peer(error: BaseException) -> PeerLost | None:
    """The error of a process that is gone, where an error of JAX tells of one: this one, or what caused it."""
    if isinstance(error, PeerLost):
        return error
    if jax.process_count() == 1:
        return None
    told: BaseException | None = error
    while told is not None and not (isinstance(told, jax.errors.JaxRuntimeError) and _LOST.search(str(told))):
        told = told.__cause__ or told.__context__
    if told is None:
        return None
    return PeerLost(
        f"process {jax.process_index()} of {jax.process_count()} lost another one ({one_sentence(told, 120)}); "
        "the same command goes on from the last checkpoint"
    )


def wait_for_all(what: str) -> None:
    """Waits until all processes have come to `what`, a name that a run uses once; nothing for one process.

    JAX's shutdown gives the others a heartbeat, and its collectives a time of their own: too little where one process
    alone has work to finish, such as the export of a model.

    Raises:
      PeerLost: one of them did not come within a day, or died and JAX left this process alive.
    """
    with telling_of_lost_peers():
        get_barrier_sync_fn()(key=what, timeout_ms=1000 * MOST_SECONDS)


class Deadline:
    """When a call ends before its run.

    Args:
      limit_s: seconds from now; never when None.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._at = None if limit_s is None else time.monotonic() + limit_s

    def over(self, due: bool) -> bool:
        """Whether it is over; several processes find out together, where all of them say that it is `due`."""
        if self._at is None:
            return False
        over = time.monotonic() > self._at
        return over if jax.process_count() == 1 else due and any_of_all(over)


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that fails in every process where it fails in one, so that none waits for it.

    Raises:
      Exception: what the block of this process raised.
      OSError, ValueError: in the others, the first sentence of those that failed.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if (lost := lost_peer(error)) is not None:  # who is gone is not asked
            raise lost from error
        failed = error
    heard = texts_of_all("" if failed is None else _told(failed))
    if failed is not None:
        raise failed
    for process, text in enumerate(heard):
        if text:
            kind, _, sentence = text.partition(" ")
            raise {"OSError": OSError, "ValueError": ValueError}[kind](f"process {process}: {sentence}")


def _told(error: Exception) -> str:
    """A kind and a sentence; of an error whose text says little alone, such as a KeyError, its name before it."""
    if isinstance(error, OSError):
        return f"OSError {one_sentence(error)}"
    name = "" if isinstance(error, ValueError | RuntimeError | TypeError) else f"{type(error).__name__}: "
    return f"ValueError {one_sentence(name + str(error))}"


def check_same(told: Mapping[str, Any], then: str = "start all with the same command") -> None:
    """Refuses processes that differ, in one sentence that names what differs; nothing for one process.

    Args:
      told: JSON values by names, the same names on all processes.
      then: what the user is to do, the end of the sentence.

    Raises:
      ValueError: they differ; on every process.
    """
    if jax.process_count() == 1:
        return
    words = [
        np.frombuffer(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest(), np.uint32)
        for value in told.values()
    ]
    heard = np.asarray(multihost_utils.process_allgather(np.stack(words)))  # [processes, names, 8]
    other = np.any(heard != heard[:1], axis=2)
    if not other.any():
        return
    names = [name for name, differs in zip(told, other.any(axis=0), strict=True) if differs]
    process = int(np.flatnonzero(other.any(axis=1))[0])
    values = texts_of_all(json.dumps(told[names[0]], sort_keys=True))
    if max(map(len, values)) <= _SHORT:
        names[0] += f" [{values[0]} on process 0, {values[process]} on process {process}]"
    raise ValueError(one_sentence(f"process {process} differs from process 0 in {', '.join(names)}: {then}"))
