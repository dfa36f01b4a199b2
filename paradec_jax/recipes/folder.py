"""What a run does beside its updates where several processes share its folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint.multihost import get_barrier_sync_fn

from paradec_jax.io import atomic_write_text, read_object
from paradec_jax.train.processes import all_or_none, telling_of_lost_peers

# Options that --allow leaves as they were.
FIXED = {"objective", "model", "layers", "lora", "block", "new_tokens", "problems"}


def claim(folder: Path, options: dict[str, Any], allow: Sequence[str] = ()) -> None:
    """Writes what a run is into its folder, by process 0, or refuses a folder where another run has begun its work.

    Where `allow` names anything, all but the model and its parts may differ, and the file stays as it was.

    Raises:
      ValueError: another run's folder.
    """
    path, mine = folder / "recipe.json", json.loads(json.dumps(options, default=str))
    with all_or_none():
        if jax.process_index():
            return
        if path.exists() and (any(folder.glob("*/run.json")) or any(folder.glob("*/trajectories"))):
            begun = read_object(path)
            differs = [name for name in mine | begun if mine.get(name) != begun.get(name)]
            if allow:
                differs = [name for name in differs if name in FIXED]
            if differs:
                others = f"{folder} was begun with other {', '.join(differs)}"
                raise ValueError(f"{others}: choose another folder with --out")
            return
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(mine, indent=2) + "\n")


def by_first(what: str, work: Callable[[], Any]) -> None:
    """Work that process 0 does alone while the others wait; `what` is a name that a run uses once.

    Raises:
      Exception: what the work raises; in the others, ValueError.
    """
    with all_or_none():
        try:
            if jax.process_index() == 0:
                work()
        finally:
            wait_for_all(what)


def wait_for_all(what: str) -> None:
    """Waits until all processes have come to `what`, a name that a run uses once.

    JAX's shutdown waits for a heartbeat only: too short where one process alone exports a model.
    """
    with telling_of_lost_peers():
        get_barrier_sync_fn()(key=what, timeout_ms=24 * 3600 * 1000)
