"""What a run does beside its updates where several processes share its folder."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint.multihost import get_barrier_sync_fn

from paradec_jax.disk.folders import check_replaceable
from paradec_jax.io import atomic_write_text, read_object
from paradec_jax.train.checkpoint import hold, holder_of
from paradec_jax.train.processes import all_or_none, telling_of_lost_peers

# Options that --allow leaves as they were.
FIXED = {"objective", "model", "layers", "lora", "block", "new_tokens", "problems"}


def claim(
    folder: Path, options: Mapping[str, Any], allow: Sequence[str] = (), begin: bool = True
) -> str:
    """Writes what a run is into its folder, once, by process 0, and returns its mark; "" where
    there is none.

    Args:
      folder: path of the folder.
      options: options of the run by name, and as `weights` digests of its models by their paths, of
        which those count that the folder has too.
      allow: where it names anything, all but the model and its parts may differ.
      begin: whether anything is written.

    Raises:
      ValueError: another run's folder, or something stands there where the run would write.
      OSError: another process is claiming the folder.
    """
    with all_or_none():
        if jax.process_index():
            return ""
        path, mine = folder / "recipe.json", json.loads(json.dumps(options, default=str))
        old = path.exists()
        holder_of(folder)  # refuses another's file
        names = rf"(recipe|config)\.json|metrics\.jsonl|data|model|adapter|round-.*|{mine.get('objective')}"
        for place in (
            folder,
            *(place for place in folder.glob("*") if re.fullmatch(names, place.name)),
        ):
            file = place.is_file()
            if (
                place.is_symlink()
                or file != (".json" in place.name)
                or not (
                    (old and place.name != "metrics.jsonl")
                    or place in (folder, folder / "data")
                    # The metrics of a run, its recipe may be gone.
                    or (
                        file
                        and re.search(
                            rb'"blend": .*"before": {.*"after": {.*}}$', place.read_bytes()
                        )
                    )
                )
            ):
                raise ValueError(
                    f"{place} exists and is not what this run writes there: choose another folder with --out"
                )
        if begin:
            with os.fdopen(hold(folder)):
                if not path.exists():
                    atomic_write_text(path, json.dumps(mine | {"mark": uuid.uuid4().hex}))
        elif not old:
            return ""
        recipe = read_object(path)
        mark, before, now = (
            recipe.pop("mark", None),
            recipe.pop("weights", {}),
            mine.pop("weights", {}),
        )
        differs = [name for name in mine | recipe if mine.get(name) != recipe.get(name)]
        differs = [f"--{name.replace('_', '-')}" for name in differs if name in FIXED or not allow]
        differs += [
            f"weights of {name}" for name in before if now.get(name, before[name]) != before[name]
        ]
        if differs:
            raise ValueError(
                f"the run of {path} was begun with other {', '.join(differs)}: choose another folder with --out"
            )
        for place in (folder / "model", folder / "adapter", *folder.glob("round-*/model")):
            check_replaceable(place, True, mark)
        return mark


def name_of(model: str) -> str:
    """The name of a model in a run's default folder, which is no other model's and the same in each
    call.

    One word is its own name, and runs/RUN/model is RUN. Any other has a digest of where it lies.
    """
    from paradec_jax.objectives import OBJECTIVES  # which a run is one of

    kinds = f"(?:{'|'.join(OBJECTIVES)})-"
    short = re.fullmatch(
        rf"((?!{kinds})[^/.][^/]*)|runs/({kinds}[^/]+)/model", os.path.relpath(model)
    )
    if short:
        return short[1] or short[2]
    place = Path(model).resolve()
    return f"{'-'.join(place.parts[-2:])}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


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
