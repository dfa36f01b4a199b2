"""What a result file says of where and when it was made: device, versions, commit, date, dtypes."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("paradec-jax", "jax", "jaxlib", "flax", "numpy")
# What changes speed from outside.
ENVIRONMENT = ("XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "PARADEC_LAYOUTS")
ROOT = Path(__file__).parents[1]
CORE = re.compile(r"^physical id\s*: (\d+)$.*?^core id\s*: (\d+)$", re.MULTILINE | re.DOTALL)


def facts() -> dict[str, Any]:
    """Everything that a result file should say of its machine and its program, as JSON values."""
    return {
        "device": device(),
        "versions": versions(),
        "commit": commit(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def device() -> dict[str, Any]:
    """The processor, its cores and threads, the memory, and the device that JAX computes on.

    `threads` are the logical processors that this process may use, `cores` the physical ones among
    all that the system tells of, `quota` the processors' worth of time that a container grants,
    None where it tells of none. `device_memory_bytes` is what JAX may use of an accelerator's own
    memory; a CPU has none.
    """
    first = jax.devices()[0]
    allowed, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    return {
        "platform": first.platform,
        "kind": processor() if first.platform == "cpu" else first.device_kind,
        "devices": jax.device_count(),
        "processor": processor(),
        "cores": len(set(CORE.findall(_text("/proc/cpuinfo")))) or None,
        "threads": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "quota": int(allowed) / int(period) if allowed.isdigit() else None,
        "memory_bytes": memory("MemTotal"),
        "device_memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
    }


def processor() -> str:
    """Name of the processor."""
    names = re.findall(r"^model name\s*: (.*)", _text("/proc/cpuinfo"), re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide speed; None of one that is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def commit(root: Path = ROOT, parts: Sequence[str] = ("paradec_jax",)) -> str | None:
    """The commit of a git checkout, with "+" where tracked files of its parts differ from it; None
    elsewhere.
    """
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *parts)
    return head and head + "+" * bool(changed)


def dtypes(*trees: Any) -> list[str]:
    """The dtypes of the floating-point arrays in trees, as they are and not as a config names them."""
    leaves = jax.tree.leaves(trees)
    return sorted(
        {str(x.dtype) for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)}
    )


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def memory(name: str) -> int | None:
    """Bytes that /proc/meminfo gives under a name, such as "MemTotal"; None where there is no such
    file.
    """
    line = re.search(rf"^{name}:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _text(path: str) -> str:
    """A file of the system, empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
