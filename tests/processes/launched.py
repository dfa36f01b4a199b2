"""Calls in several processes on this machine, since the tests' own is one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LONG = 600  # seconds


@contextlib.contextmanager
def started(
    folder: Path,
    *calls: list[Any],
    processes: int = 2,
    devices: int = 2,
    heartbeat: int = 20,
    patience: int = 5,
) -> Iterator[subprocess.Popen[str]]:
    """The launcher of processes that make calls of `on_processes.py`, ended with them at the end of
    the block.
    """
    path = [ROOT, HERE, HERE.parent, HERE.parent / "mesh", HERE.parent / "laws"]
    told = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "-m",
        "experiments.launch.local",
        "--processes",
        str(processes),
        "--devices",
        str(devices),
    ]
    command += ["--patience", str(patience)]
    program = [
        sys.executable,
        str(HERE / "on_processes.py"),
        str(folder),
        str(heartbeat),
        json.dumps(calls),
    ]
    with (folder / "said").open("w") as said:
        launcher = subprocess.Popen(
            [sys.executable, *command, "--", *program],
            env=os.environ | told,
            cwd=ROOT,
            stdout=said,
            stderr=said,
            text=True,
        )
        try:
            yield launcher
        finally:
            for process in [*pids(folder), launcher.pid]:
                with contextlib.suppress(ProcessLookupError):
                    if launcher.poll() is None:
                        os.kill(process, signal.SIGKILL)
            launcher.wait()


def pids(folder: Path) -> list[int]:
    """Numbers that the system gave the processes, by theirs; only of those that have begun."""
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*")) if path.read_text()]


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def launched(folder: Path, *calls: list[Any], **options) -> list[Any]:
    """What calls, each a list of a name and arguments, return in each process."""
    with started(folder, *calls, **options) as launcher:
        code = launcher.wait(LONG)
    assert code == 0, said(folder)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
