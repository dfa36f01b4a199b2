"""The processes of a run: how they find each other, what they tell each other, and how one leaves
the others.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from paradec_jax.io import one_sentence

VARIABLES = ("PARADEC_COORDINATOR", "PARADEC_PROCESSES", "PARADEC_PROCESS")
# What JAX, a SLURM step, mpirun and an indexed job of Kubernetes set in each of their processes.
CLUSTERS = (
    "JAX_COORDINATOR_ADDRESS",
    "SLURM_STEP_NODELIST",
    "OMPI_MCA_orte_hnp_uri",
    "JOB_COMPLETION_INDEX",
)
_ROOM = 4096  # bytes that a process tells the others at a time


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_s: int = 100,
) -> None:
    """Joins the processes of a run, to be called before anything asks JAX for a device; nothing for
    one process.

    Without a coordinator, given or in the environment (`VARIABLES`, which
    experiments/launch/local.py sets), they are those that JAX finds: a SLURM step, a slice of TPUs,
    a job of Kubernetes, mpirun; `processes=1` looks for none.

    Args:
      coordinator, processes, process: HOST:PORT of process 0, number of processes, and which one
        this is, from 0.
      heartbeat_s: seconds after which a process that is silent counts as dead, and the others end.

    Raises:
      ValueError, OSError: numbers do not fit; not all came in time, or JAX was asked for a device
        before.
    """
    given: tuple[Any, ...] = (coordinator, processes, process)
    if given == (None, None, None):
        address, *numbers = (os.environ.get(name) for name in VARIABLES)
        given = (address, *(None if number is None else int(number) for number in numbers))
    address, count, which = given
    if count == 1:
        return
    detect = given == (None, None, None)
    if not detect and (None in given or ":" not in address or not 0 <= which < count):
        raise ValueError(
            f"give coordinator as HOST:PORT and process from 0 to below processes, not {given}"
        )
    try:
        jax.distributed.initialize(
            address,
            count,
            which,
            cluster_detection_method=None if detect else "deactivate",
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=heartbeat_s,
        )
    except ValueError as error:
        if not detect or "coordinator_address should be defined" not in str(error):
            raise  # else JAX found nothing to join
    except RuntimeError as error:
        # Other processes are in the environment, or among devices that were asked for already
        # (TPUs).
        others = any(name in os.environ for name in CLUSTERS) or jax.process_count() > 1
        if "must be called before" not in str(error) or not detect or others:
            raise OSError(one_sentence(error)) from error


def leave(error: BaseException | str) -> NoReturn:
    """Ends a process that cannot go on: one sentence, code 1, and no wait for the others as at a
    common exit.
    """
    if not jax.distributed.is_initialized():
        raise SystemExit(str(error)) from None
    print(error, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


class PeerLost(OSError):
    """A collective failed, as a rule because another process is gone; the checkpoints stay."""


@contextlib.contextmanager
def telling_of_lost_peers() -> Iterator[None]:
    """A block of several processes whose failed collectives are `PeerLost`, with JAX's error below
    it.

    Where a process waits outside of a collective, JAX ends it with SIGABRT within the heartbeat.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise PeerLost(
            f"process {jax.process_index()} of {jax.process_count()} lost another one, or cannot go on "
            f"({one_sentence(error, 120)}): the same command goes on from the last checkpoint"
        ) from error


def texts_of_all(text: str) -> list[str]:
    """One text from each process, in their order. A collective."""
    if jax.process_count() == 1:
        return [text]
    room = np.zeros(_ROOM, np.uint8)
    mine = text.encode()[:_ROOM]
    room[: len(mine)] = np.frombuffer(mine, np.uint8)
    rooms = np.asarray(multihost_utils.process_allgather(room))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rooms]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that fails in every process where it fails in one: in the others with a ValueError of
    its sentence.
    """
    failed: Exception | None = None
    try:
        with telling_of_lost_peers():
            yield
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, PeerLost):
            raise
        failed = error
    mine = "" if failed is None else one_sentence(f"{type(failed).__name__}: {failed}")
    for process, text in enumerate(texts_of_all(mine)):
        if failed is not None:
            raise failed
        if text:
            raise ValueError(f"process {process}: {text}")


def check_same(values: Mapping[str, Any], then: str = "start all with the same command") -> None:
    """Raises ValueError on all processes where their JSON values differ, in one sentence that names
    what differs.
    """
    if jax.process_count() == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    mine = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    first, *others = (json.loads(text) for text in texts_of_all(json.dumps(mine)))
    for process, other in enumerate(others, 1):
        names = [name for name in first if first[name] != other[name]]
        if not names:
            continue
        both = texts_of_all(texts[names[0]])
        if max(map(len, both)) <= 40:
            names[0] += f" [{both[0]} on process 0, {both[process]} on process {process}]"
        where = f"process {process} differs from process 0 in {', '.join(names)}"
        raise ValueError(one_sentence(f"{where}: {then}"))
