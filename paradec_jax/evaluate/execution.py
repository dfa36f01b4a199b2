"""Runs generated code and its tests, one sample a process.

**This guards against accidents only: it is no sandbox.** A sample gets a fresh interpreter (`-I`) in its own
session and its own temporary folder, an empty environment, no standard input, limits on memory, processor time,
file size and processes, and a wall clock that kills its whole process group; where Linux lets an ordinary user
make one (`unshare -rn`), a network namespace without a network. It can still read whatever the user can read,
write wherever the user can write, and leave processes in a session of their own. Run the code of a model
that you do not trust in a container or a virtual machine, for example

    docker run --rm --network none --read-only --tmpfs /tmp -v "$PWD":/work:ro -w /work IMAGE python ...

A sample passes only if the parent reads a random word that the child writes after the tests, so code that ends
the interpreter early, with whatever exit code, does not pass.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = Path(__file__).with_name("execution_child.py")
_TAIL = 2000  # bytes of standard error that are kept
_PROBE_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Sample:
    """Code to be judged, and the tests that run after it in the same module."""

    code: str
    tests: str


@dataclasses.dataclass(frozen=True)
class ResourceLimits:
    """What a sample may use.

    Attributes:
      processor: whole seconds of processor time.
      wall: seconds by the clock; more, because other work may hold the processor.
      memory: bytes of address space.
      file: bytes of any file.
      processes: processes and threads of the user, counted within the network namespace where there is one;
        root is exempt.
    """

    processor: int = 10
    wall: float = 30.0
    memory: int = 2**30
    file: int = 2**24
    processes: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be above 0, not {getattr(self, field.name)}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a sample fared.

    Attributes:
      passed: whether the tests ran to their end.
      reason: "passed"; "failed" (an exception, an early exit, a signal); "timeout" (wall clock or processor
        time); "error" (the sample was never started).
      stderr: the end of what it wrote to standard error.
    """

    passed: bool
    reason: str
    stderr: str


def execute(program: Sample, *, allow: bool = False, limits: ResourceLimits | None = None) -> Outcome:
    """Runs a program in a process of its own and says whether its tests ran to their end.

    Args:
      program: code and tests.
      allow: must be True: the caller has read what this module protects from, and what not.
      limits: what the sample may use; the defaults of `ResourceLimits` when None.

    Raises:
      ValueError: `allow` was not given.
      OSError: the system is not Linux, or no process can be started.
    """
    if not allow:
        raise ValueError(
            "running generated code is off: pass allow=True if you accept that this guards against accidents only"
        )
    if sys.platform != "linux":
        raise OSError(f"generated code is run on Linux only, not on {sys.platform}: judge samples elsewhere")
    limits = ResourceLimits() if limits is None else limits
    with tempfile.TemporaryDirectory(prefix="sample-", ignore_cleanup_errors=True) as folder:
        inside, report, errors = (Path(folder) / name for name in ("inside", "report", "errors"))
        inside.mkdir()
        # A module of its own for the code, so that an unclosed quote cannot swallow the tests.
        code = program.code + "\n"
        (inside / "candidate.py").write_text(code, encoding="utf-8", errors="replace")
        (inside / "program.py").write_text(code + program.tests, encoding="utf-8", errors="replace")
        word = secrets.token_hex(16)
        status = _run(_command(word, limits), inside, report, errors, limits.wall)
        return _outcome(status, report.read_bytes().decode(errors="replace"), _tail(errors), word)


@functools.cache
def has_network_namespace() -> bool:
    """Whether samples run without a network here; found out once."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "-rn", sys.executable, "-I", "-c", "pass"]
    try:
        found = subprocess.run(
            command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def _command(word: str, limits: ResourceLimits) -> list[str]:
    isolate = [shutil.which("unshare") or "unshare", "-rn"] if has_network_namespace() else []
    numbers = (limits.memory, limits.processor, limits.file, limits.processes)
    return [*isolate, sys.executable, "-I", "-B", str(CHILD), word, *map(str, numbers)]


def _run(command: list[str], folder: Path, report: Path, errors: Path, seconds: float) -> int | None:
    """Exit status of a command, or None where the clock ended it. Nothing of its group outlives this call.

    There is no `preexec_fn`: it would run Python between fork and exec of a process full of threads. The
    child sets its own limits.
    """
    with report.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(status: int | None, report: str, stderr: str, word: str) -> Outcome:
    started = report.startswith("started\n")
    if status is not None and started and word in report:
        return Outcome(True, "passed", stderr)
    if status is None or status == -signal.SIGXCPU:
        return Outcome(False, "timeout", stderr)
    if status < 0:
        stderr += f"[ended by {signal.Signals(-status).name}]\n"
    return Outcome(False, "failed" if started else "error", stderr)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        return file.read().decode("utf-8", errors="replace")
