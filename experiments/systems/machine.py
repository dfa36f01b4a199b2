"""What of a machine people want to read, and what of its memory is free."""

from collections.abc import Mapping
from typing import Any

import jax

from paradec_jax import facts


def in_words(record: Mapping[str, Any]) -> str:
    """One line for people: the device, the versions and the commit of a record."""
    of, jax_version = record["device"], record["versions"]["jax"]
    cores = f"{of['threads']} threads" + (f" of {of['cores']} cores" if of["cores"] else "")
    memory = of["device_memory_bytes"] or of["memory_bytes"]
    parts = [of["kind"], f"{memory / 2**30:.0f} GiB" if memory else ""]
    parts += [cores if of["platform"] == "cpu" else f"beside {of['processor']}, {cores}"]
    parts += [
        f"jax {jax_version}",
        f"commit {record['commit'][:12]}" if record["commit"] else "no commit known",
    ]
    return ", ".join(part for part in [*parts, record["date"]] if part)


def memory_left() -> int | None:
    """Bytes that can still be had on the default device, None where nothing tells."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return facts.memory("MemAvailable")
