"""One run in several processes: how each finds the others."""

import os
import sys
from typing import Any, NoReturn

import jax

from paradec_jax.io import one_sentence

VARIABLES = ("PARADEC_COORDINATOR", "PARADEC_PROCESSES", "PARADEC_PROCESS")
# What JAX, a SLURM step, mpirun and an indexed job of Kubernetes set in each of their processes.
CLUSTERS = (
    "JAX_COORDINATOR_ADDRESS",
    "SLURM_STEP_NODELIST",
    "OMPI_MCA_orte_hnp_uri",
    "JOB_COMPLETION_INDEX",
)


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_s: int = 100,
    start_s: int = 300,
) -> None:
    """Joins the processes of a run, to be called before anything asks JAX for a device; nothing for one process.

    Without a coordinator, given or in the environment (`VARIABLES`, which experiments/launch/local.py sets), the
    processes are those that JAX finds: a SLURM step, a slice of TPUs, a job of Kubernetes, mpirun. With `processes=1`
    alone there is one, whatever JAX finds.

    Args:
      coordinator: HOST:PORT of process 0, which the others can reach.
      processes: how many there are.
      process: which this one is, from 0.
      heartbeat_s: seconds after which a process that is silent counts as dead, and the others end.
      start_s: seconds to wait for all of them.

    Raises:
      ValueError: a part of the three alone, numbers that do not fit, a time below a second, a second call, or one
        after JAX was asked for a device where there are other processes.
      OSError: not all processes came in time, or what else JAX says; jaxlib 0.10 itself aborts a process (SIGABRT)
        for which the others are late, and crashes one whose port is taken.
    """
    if min(heartbeat_s, start_s) < 1:
        raise ValueError(f"heartbeat_s and start_s must be at least 1, not {heartbeat_s} and {start_s}")
    given = (coordinator, processes, process)
    if given == (None, 1, None):
        return
    if given == (None, None, None):
        address, *numbers = (os.environ.get(name) for name in VARIABLES)
        try:
            processes, process = (None if number is None else int(number) for number in numbers)
        except ValueError:
            raise ValueError(
                f"{VARIABLES[1]} and {VARIABLES[2]} must be whole numbers, not {numbers}"
            ) from None
        given = (address, processes, process)
    found = given == (None, None, None)
    if not found:
        coordinator, processes, process = given
        if coordinator is None or processes is None or process is None:
            raise ValueError(f"coordinator, processes and process belong together, not {given}")
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"coordinator must be HOST:PORT, not {coordinator}")
        if processes < 1 or not 0 <= process < processes:
            raise ValueError(f"process must be from 0 to {processes - 1} of {processes}, not {process}")
        if processes == 1:
            return
    if jax.distributed.is_initialized():
        raise ValueError("the processes of this run have met already: call initialize once")
    times: dict[str, Any] = {
        "initialization_timeout": start_s,
        "heartbeat_timeout_seconds": heartbeat_s,
        "shutdown_timeout_seconds": heartbeat_s,
    }
    try:
        if found:
            jax.distributed.initialize(**times)
        else:
            jax.distributed.initialize(*given, cluster_detection_method="deactivate", **times)
    except ValueError as error:
        if not found or "coordinator_address should be defined" not in str(
            error
        ):  # JAX found nothing to join
            raise
    except RuntimeError as error:
        if "must be called before" in str(error):
            # Other processes are in the environment, or among devices that were asked for already (TPUs).
            if found and not (any(name in os.environ for name in CLUSTERS) or jax.process_count() > 1):
                return
            raise ValueError(
                "initialize must be called before anything asks JAX for a device, such as jax.devices()"
            ) from error
        if "DEADLINE_EXCEEDED" not in str(error):
            raise OSError(one_sentence(error)) from error
        told = "the processes came" if found else f"{given[1]} processes came to {given[0]}"
        raise OSError(f"not all of {told} in {start_s} s") from error


def leave(error: BaseException | str) -> NoReturn:
    """Ends a process that cannot go on: one sentence, code 1, and over processes no wait for the others.

    An exit of Python would have JAX wait until all processes end, or the heartbeat is over, and abort.
    """
    if not jax.distributed.is_initialized():
        raise SystemExit(str(error)) from None
    print(error, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
