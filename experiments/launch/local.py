"""Starts a command as several processes on this machine, which find each other; all end when one
fails.

`python -m experiments.launch.local --processes 2 --devices 2 -- paradec train sft --model M --data
F`

SIGTERM and SIGINT go on to all of them; a run of `fit` then saves and ends with code 0. Those that
have not ended when `--grace` is over, since one of them hangs as a rule, are killed.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

# What `paradec_jax.train.processes` reads; to import it would take seconds.
VARIABLES = ("PARADEC_COORDINATOR", "PARADEC_PROCESSES", "PARADEC_PROCESS")
# In jaxlib 0.10, without the second, collectives of simulated devices may wait for each other for
# ever; with the pass on, joined all-reduces meet others of the next process, and gloo ends both
# ("Received data size doesn't match").
FLAGS = "--xla_force_host_platform_device_count={} --xla_cpu_enable_concurrency_optimized_scheduler=false"
WITHOUT, PASS = "--xla_disable_hlo_passes=", "cpu-all-reduce-combiner"
# Threads of XLA's pool, by the variable NPROC: a collective holds one while it waits, so there must
# be many.
MANY = 16  # a device


def environments(processes: int, devices: int | None, port: int) -> list[dict[str, str]]:
    """What each process finds in its environment besides that of this one."""
    told = {}
    if devices is not None:
        told = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags(os.environ.get("XLA_FLAGS", ""), devices),
            "NPROC": os.environ.get("NPROC", str(MANY * devices)),
        }
    values = [(f"localhost:{port}", str(processes), str(process)) for process in range(processes)]
    return [told | dict(zip(VARIABLES, value, strict=True)) for value in values]


def flags(given: str, devices: int) -> str:
    """XLA's flags: those that are given, and these; passes that are switched off already stay so."""
    words = given.split()
    off = [word.removeprefix(WITHOUT) for word in words if word.startswith(WITHOUT)]
    kept = [word for word in words if not word.startswith(WITHOUT)]
    last = off[-1:]  # of several XLA reads one
    return " ".join([*kept, FLAGS.format(devices), WITHOUT + ",".join([*last, PASS])])


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


class Asked:
    """When the processes were first asked to end.

    Attributes:
      at: seconds of the monotonic clock, infinity before.
    """

    at = math.inf


def watch(
    children: Sequence[subprocess.Popen[bytes]], patience_s: float, asked: Asked, grace_s: float
) -> int:
    """Waits for all; kills the others so many seconds after one fails, and all so many after they
    are asked to end.

    Returns:
      0 where all end with 0, else the code of the one that failed first; 128 + n for signal n.
    """
    failed, until = None, math.inf
    while any(child.poll() is None for child in children):
        for process, child in enumerate(children):
            if failed is None and child.poll():
                failed, until = process, time.monotonic() + patience_s
                say(
                    f"process {process} of {len(children)} {ended(child.returncode)}: the others are ended"
                )
        if failed is None and time.monotonic() > asked.at + grace_s:
            late = [process for process, child in enumerate(children) if child.poll() is None]
            if not late:
                break
            failed, until = late[0], 0.0
            say(
                f"{len(late)} of {len(children)} have not ended {grace_s:g} s after the signal: they are killed"
            )
        if time.monotonic() > until:
            for child in children:
                child.kill()
        time.sleep(0.05)
    codes = [child.returncode for child in children]
    if failed is None:
        failed = next((process for process, code in enumerate(codes) if code), None)
        if failed is None:
            return 0
        say(f"process {failed} of {len(children)} {ended(codes[failed])}")
    return codes[failed] if codes[failed] > 0 else 128 - codes[failed]


def ended(code: int) -> str:
    """How a process ended, in words."""
    return f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def say(sentence: str) -> None:
    """One line on standard error."""
    print(f"launch: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def handing_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[Asked]:
    """SIGTERM and SIGINT go on to the children, as SIGTERM; a second SIGINT kills them."""
    interrupts, asked = 0, Asked()

    def hand_on(number: int, frame: object) -> None:
        nonlocal interrupts
        del frame
        asked.at = min(asked.at, time.monotonic())
        interrupts += number == signal.SIGINT
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    former = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="launch", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument("--devices", type=int, help="simulated devices of each, on the CPU")
    parser.add_argument("--port", type=int, help="of the coordinator; a free one if left out")
    parser.add_argument(
        "--patience",
        type=float,
        default=5.0,
        help="seconds for the others to end when one has failed",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        help="seconds for all to save and end after a signal was handed on, before they are killed",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="after --, what each process runs"
    )
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if (
        options.processes < 1
        or (options.devices is not None and options.devices < 1)
        or not command
    ):
        parser.error("need at least one process, one device, and a command after --")
    port = free_port() if options.port is None else options.port
    children: list[subprocess.Popen[bytes]] = []
    try:
        with handing_on(children) as asked:
            for told in environments(options.processes, options.devices, port):
                children.append(
                    subprocess.Popen(command, env=os.environ | told, start_new_session=True)
                )
            return watch(children, options.patience, asked, options.grace)
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
