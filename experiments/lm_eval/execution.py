"""Runs generated code and its tests, one sample a process.

**This guards against accidents only: it is no sandbox.** A sample gets a fresh interpreter (`-I`)
in its own session, its own temporary folder, an empty environment, no standard input, and limits on
memory, time, files and processes. Where Linux lets an ordinary user make one (`unshare -rn`), it
gets a namespace without a network. It can still read and write what the user can: run code that you
do not trust in a container or a virtual machine.

A sample passes only if the parent reads a random word that the child writes after the tests: code
that ends the interpreter early does not pass. The parent starts this file as a script, which is the
child.
"""

import ast
import contextlib
import dataclasses
import functools
import os
import resource
import runpy
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired, run

CHILD = Path(__file__)
TAIL = 2000  # bytes of standard error that are kept


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a sample.

    Attributes:
      processor: whole seconds of processor time.
      wall: seconds by the clock.
      memory: bytes of address space.
      file: bytes of any file.
      processes: processes and threads of the user.
    """

    processor: int = 10
    wall: float = 30.0
    memory: int = 2**30
    file: int = 2**24
    processes: int = 32


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a sample.

    Attributes:
      passed: whether the tests ran to their end.
      reason: "passed"; "failed" (an exception, an early exit, a signal); "timeout"; "error" (it
        never started).
      stderr: end of what it wrote to standard error.
    """

    passed: bool
    reason: str
    stderr: str


def execute(code: str, tests: str, limits: Limits = Limits()) -> Outcome:
    """Runs code, then its tests in the same module, and says whether the tests ran to their end.

    Raises:
      OSError: the system is not Linux, or no process can be started.
    """
    if sys.platform != "linux":
        raise OSError(f"generated code is run on Linux only, not on {sys.platform}")
    with tempfile.TemporaryDirectory(prefix="sample-", ignore_cleanup_errors=True) as folder:
        inside, report, errors = (Path(folder) / name for name in ("inside", "report", "errors"))
        inside.mkdir()
        # The code has a file of its own too, which the child parses first: an open quote must not
        # swallow the tests.
        for name, text in (("candidate.py", code + "\n"), ("program.py", f"{code}\n{tests}")):
            (inside / name).write_text(text, encoding="utf-8", errors="replace")
        word = secrets.token_hex(16)
        isolate = [shutil.which("unshare") or "unshare", "-rn"] if has_network_namespace() else []
        numbers = (limits.memory, limits.processor, limits.file, limits.processes)
        command = [*isolate, sys.executable, "-I", "-B", str(CHILD), word, *map(str, numbers)]
        status = _run(command, inside, report, errors, limits.wall)
        stderr = errors.read_bytes()[-TAIL:].decode(errors="replace")
        lines = report.read_bytes().decode(errors="replace")
    if status == 0 and word in lines:
        return Outcome(True, "passed", stderr)
    if status is None or status == -signal.SIGXCPU:
        return Outcome(False, "timeout", stderr)
    if status < 0:
        stderr += f"[ended by {signal.Signals(-status).name}]\n"
    return Outcome(False, "failed" if lines.startswith("started\n") else "error", stderr)


@functools.cache
def has_network_namespace() -> bool:
    """Whether samples run without a network here; tried once."""
    command = [shutil.which("unshare") or "", "-rn", sys.executable, "-I", "-c", "pass"]
    try:
        return run(command, env={}, capture_output=True, timeout=10).returncode == 0
    except (OSError, TimeoutExpired):
        return False


def _run(
    command: list[str], folder: Path, report: Path, errors: Path, seconds: float
) -> int | None:
    """Exit status of a command, None where the clock ended it; its whole process group is killed at
    the end.
    """
    with report.open("wb") as out, errors.open("wb") as err:
        process = Popen(
            command,
            cwd=folder,
            env={},
            stdin=DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def child(word: str, memory: int, processor: int, file: int, processes: int) -> None:
    """Sets the limits, runs `program.py` of the working folder and reports the word after its end."""
    sys.argv[:] = ["program.py"]
    # What the program prints goes nowhere; the report stays open under a number that the program
    # does not know.
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    bounds = {"CORE": 0, "AS": memory, "FSIZE": file, "NPROC": processes, "CPU": processor + 1}
    for name, bound in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        hard = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        # The soft limit of time ends the process with SIGXCPU, which the parent tells from other
        # ends.
        resource.setrlimit(kind, (min(processor, hard) if name == "CPU" else hard, hard))
    write, end, number = os.write, os._exit, os.getpid  # the program may put its own in their place
    own = number()
    write(report, b"started\n")
    ast.parse(Path("candidate.py").read_text(encoding="utf-8"), "candidate.py")
    runpy.run_path("program.py", run_name="program")  # no "__main__": its main block is not run
    if number() == own:  # and not a copy that the program made
        write(report, word.encode())
    end(0)


if __name__ == "__main__":
    child(sys.argv[1], *map(int, sys.argv[2:]))
