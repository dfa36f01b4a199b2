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
from paradec_jax.io import atomic_write_text, hold, holder_of, read_object
from paradec_jax.train.processes import all_or_none

# Options that --allow leaves as they were.
FIXED = {"objective", "model", "layers", "lora", "block", "new_tokens", "problems"}
# The end of FOLDER/metrics.jsonl, by which it is known where the run's recipe.json is gone.
LAST_LINE = re.compile(rb'"blend": .*"before": {.*"after": {.*}}$')


def claim(
    folder: Path, options: Mapping[str, Any], allow: Sequence[str] = (), begin: bool = True
) -> str:
    """Writes what a run is into FOLDER/recipe.json, once, by process 0, and returns its mark; ""
    where there is none.

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
        path = folder / "recipe.json"
        holder_of(folder)  # refuses another's file
        check_places(folder, options.get("objective", ""), path.exists())
        mine = json.loads(json.dumps(options, default=str))
        if begin:
            with hold(folder):
                if not path.exists():
                    atomic_write_text(path, json.dumps(mine | {"mark": uuid.uuid4().hex}))
        elif not path.exists():
            return ""
        recipe = read_object(path)
        mark, now = recipe.pop("mark", None), mine.pop("weights", {})
        before = recipe.pop("weights", {})
        names = [name for name in mine | recipe if mine.get(name) != recipe.get(name)]
        differs = [f"--{name.replace('_', '-')}" for name in names if name in FIXED or not allow]
        differs += [f"weights of {name}" for name, x in before.items() if now.get(name, x) != x]
        if differs:
            raise ValueError(
                f"the run of {path} was begun with other {', '.join(differs)}: "
                "choose another folder with --out"
            )
        for place in (folder / "model", folder / "adapter", *folder.glob("round-*/model")):
            check_replaceable(place, True, mark)
        return mark


def check_places(folder: Path, objective: str, begun: bool) -> None:
    """Refuses a folder where something else stands in a place that a run writes to.

    Args:
      folder: path of the folder.
      objective: name of the run's objective.
      begun: whether the folder has the recipe of a run.

    Raises:
      ValueError: in one sentence.
    """
    names = r"(recipe|config)\.json|metrics\.jsonl|data|model|adapter|round-.*|"
    places = [place for place in folder.glob("*") if re.fullmatch(names + objective, place.name)]
    for place in (folder, *places):
        kind = place.is_file() == (".json" in place.name) and not place.is_symlink()
        if kind and place.name == "metrics.jsonl":
            ours = LAST_LINE.search(place.read_bytes()) is not None
        else:
            ours = begun or place in (folder, folder / "data")
        if not (kind and ours):
            raise ValueError(
                f"{place} exists and is not what this run writes there: "
                "choose another folder with --out"
            )


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


def say(text: str) -> None:
    """Prints a line, once whatever the number of processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


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
            # JAX's shutdown waits for a heartbeat only: too short where one process alone exports
            # a model.
            get_barrier_sync_fn()(key=what, timeout_ms=24 * 3600 * 1000)
