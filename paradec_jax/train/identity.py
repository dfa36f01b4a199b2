"""`run.json`: what makes a run what it is, and where it was computed."""

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paradec_jax import facts
from paradec_jax.io import atomic_write_text, one_sentence, read_object
from paradec_jax.sharding.processes import gathered, shared
from paradec_jax.train.checkpoint import describe
from paradec_jax.train.iterator import DataIterator, Part
from paradec_jax.train.state import TrainState

PyTree = Any
NAME = "run.json"
FORMAT = 1
PACKAGES = (*facts.PACKAGES, "optax", "orbax-checkpoint")
# Counts and the like that `fit` is given, and what is found of its other arguments.
SETTINGS = ("steps", "accumulate", "ema_decay", "ema_warmup", "rounds")
NAMES = (*SETTINGS, "optimizer", "data", "key", "parameters", "frozen", "recipe")


def identity(
    shape: TrainState,
    optimizer: optax.GradientTransformation,
    data: DataIterator,
    key: jax.Array,
    *,
    frozen: PyTree = None,
    recipe: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """What a run must share with the one that it goes on from, as JSON values by the names of `NAMES`.

    Args:
      shape: the state before the first update, as arrays or their shapes.
      optimizer: told by the layout of its state and by a digest of its program, numbers such as rates included.
      data: told by its `digest` where it has one, and by the first batch from where it stands; it stands there again.
      key: of the run.
      frozen: told by shapes and checksums.
      recipe: told as it is: whatever else the caller says makes the run, a dataclass or JSON values.
      **settings: the values of `SETTINGS`.

    Raises:
      ValueError: if `data` is at its end, or `recipe` is nothing that JSON can hold.
    """
    words = np.asarray(jax.random.key_data(key)).tolist()
    return {
        **{name: _json(name, settings[name]) for name in SETTINGS},
        "optimizer": _optimizer(optimizer, shape),
        "data": _data(data),
        "key": {"impl": str(jax.random.key_impl(key)), "words": words},
        "parameters": describe(shape.params, checksums=False),
        "frozen": describe(_numbers(frozen), checksums=True),
        "recipe": _json("recipe", recipe),
    }


def values_of(*trees: PyTree) -> dict[str, list[Any]]:
    """Shapes and checksums of what this process has of its own: to be the same on all.

    Of arrays that lie on all processes already, these are the copies of those that lie whole on each.
    """
    own = [x for x in jax.tree.leaves(trees) if not shared(x) or x.is_fully_replicated]
    return describe(_numbers([x.addressable_data(0) if shared(x) else x for x in own]), checksums=True)


def compare(folder: Path, run: Mapping[str, Any], allow: Collection[str] = ()) -> list[dict[str, Any]]:
    """Where the run of a folder was computed so far; nothing of one without `run.json`.

    Args:
      folder: of the run.
      run: of `identity`.
      allow: names of `NAMES` that may differ.

    Raises:
      ValueError: a `run.json` that is broken, or of a run that differs elsewhere.
    """
    path = folder / NAME
    if not path.exists():
        return []
    before, computed = _read(path)
    refused = [name for name in NAMES if before.get(name) != run[name] and name not in allow]
    if refused:
        told = ", ".join(_difference(name, before.get(name), run[name]) for name in refused)
        names = ", ".join(f'"{name}"' for name in refused)
        what = f"{folder} was begun with other {told}: choose another folder, or go on with allow=({names},)"
        raise ValueError(one_sentence(what))
    return computed


def record(
    folder: Path,
    run: Mapping[str, Any],
    computed: list[dict[str, Any]],
    update: int,
    mesh: dict[str, int] | None = None,
) -> None:
    """Writes `run.json`: what the run is from now on, and where it was and is computed (device, versions, commit).

    Args:
      folder: of the run.
      run: of `identity`.
      computed: of `compare`, empty for a new run; where it is computed now is added where that is another place.
      update: the next one.
      mesh: sizes of the mesh's axes by their names, where it is computed on one.
    """
    device = facts.device()
    here = {
        "device": {name: device[name] for name in ("platform", "kind", "devices")},
        "processes": jax.process_count(),
        "versions": facts.versions(PACKAGES),
        "commit": facts.commit(),
        "mesh": mesh,
    }
    if not computed or any(computed[-1].get(name) != here[name] for name in here):
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        computed = [*computed, {"from_update": update, "date": date, **here}]
    told = {"format": FORMAT, "run": dict(run), "computed": computed}
    atomic_write_text(folder / NAME, json.dumps(told, indent=2) + "\n")


def check_allowed(allow: Iterable[str]) -> None:
    """Raises ValueError for a name that no run has."""
    if isinstance(allow, str) or (unknown := sorted(set(allow) - set(NAMES))):
        given = repr(allow) if isinstance(allow, str) else ", ".join(unknown)
        raise ValueError(f"allow must be a tuple of names among {', '.join(NAMES)}, not {given}")


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        told = read_object(path)
        run, computed = told["run"], told["computed"]
        if told["format"] != FORMAT or not isinstance(run, dict) or not isinstance(computed, list):
            raise ValueError(f"its format is {told['format']!r}")
        if not all(isinstance(entry, dict) for entry in computed):
            raise ValueError("its list of machines is none")
    except (ValueError, KeyError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            one_sentence(
                f"{path} is broken ({reason}): restore it, or remove it to go on without a comparison"
            )
        ) from error
    return run, computed


def _difference(name: str, before: Any, now: Any) -> str:
    """A name, with both values where these are short, or the first entry that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        first = next(entry for entry in {**before, **now} if before.get(entry) != now.get(entry))
        before, now, name = before.get(first), now.get(first), f"{name} ({first})"
    told = [json.dumps(value) for value in (before, now)]
    return f"{name} [{told[0]} there, {told[1]} here]" if max(map(len, told)) <= 40 else name


def _optimizer(optimizer: optax.GradientTransformation, shape: TrainState) -> dict[str, str]:
    """Digests of the layout of its state, and of what it computes from gradients."""
    params, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (shape.params, shape.opt_state)
    )
    program = jax.make_jaxpr(optimizer.update)(params, state, params)
    text = re.sub(r"\b0x[0-9a-f]+", "", str(program))  # addresses of functions
    return {
        "state": _digest(json.dumps(describe(state, checksums=False), sort_keys=True).encode()),
        "program": _digest(text.encode(), *(np.asarray(x).tobytes() for x in program.consts)),
    }


def _data(data: DataIterator) -> dict[str, str]:
    place = data.get_state()
    try:
        batch = next(data)
    except StopIteration:
        raise ValueError(
            "the data has no batch where it stands; give it as it is before the first update"
        ) from None
    data.set_state(place)
    batch = batch.rows if isinstance(batch, Part) else batch
    parts = []
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        x = np.ascontiguousarray(gathered(x))
        parts += [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}".encode(), x.tobytes()]
    found = {"first batch": _digest(*parts)}
    digest = getattr(data, "digest", None)
    return found if digest is None else {"digest": str(digest() if callable(digest) else digest), **found}


def _numbers(tree: PyTree) -> PyTree:
    """The leaves that are numbers, as arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    return {
        name: jnp.asarray(x)
        for name, x in named.items()
        if any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
    }


def _json(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be what JSON can hold ({error})") from error


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()
