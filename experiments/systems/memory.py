"""What the system says of the memory of a process."""

from pathlib import Path


def reading(name: str) -> float:
    """MiB by a name of /proc/self/status.

    VmRSS is what lies in memory now, VmHWM the most that ever did; RssAnon is of VmRSS without pages of files.

    Raises:
      ValueError: a system that tells no such thing.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
    except (OSError, StopIteration):
        raise ValueError(f"this system does not tell {name} in /proc/self/status") from None
