"""What the scripts write, and go on from: results beside the command, the options and the machine
that made them.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax import facts
from paradec_jax.io import atomic_write_text

KEPT = ("device", "versions", "commit", "environment")  # facts that parts of one result must share
# but for these, which differ between runs on one device
VARYING = (
    "memory_bytes",
    "device_memory_bytes",
)
PROGRAMS = ("paradec_jax", "convert", "experiments/*.py")  # whose changes a commit does not tell of


def write_record(
    path: Path,
    options: Any,
    results: Mapping[str, Any],
    *,
    dtypes: Sequence[str] = (),
) -> None:
    """Writes a result as JSON with all that its figures depend on, whole or not at all.

    Args:
      path: of the JSON file; its folder is made where there is none.
      options: a dataclass, or a mapping where some of its fields are told otherwise.
      results: by name, as JSON values.
      dtypes: of the arrays that were computed with (`facts.dtypes`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(record(options, results, dtypes), indent=1) + "\n")


def record(options: Any, results: Mapping[str, Any], dtypes: Sequence[str] = ()) -> dict[str, Any]:
    """What `write_record` writes as JSON: command, options (the seed is one), facts with dtypes,
    and the results.

    Paths stand as names, since folders differ between machines.
    """
    told = _told_options(options)
    made = facts.facts() | {"commit": facts.commit(parts=PROGRAMS), "dtypes": sorted(set(dtypes))}
    return {"command": command(), "options": told, "facts": made, **results}


def rows_begun(path: Path, options: Any) -> Any:
    """The `rows` of a record that was begun with the same options; None where there is no file.

    Options of the file that are no options any more do not count.

    Raises:
      ValueError: a file of other options, or of something else.
    """
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        before, rows = dict(table["options"]), table["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no file of rows ({error}): name another file or folder"
        ) from None
    now = json.loads(json.dumps(_told_options(options)))
    if differing := [name for name in now if before.get(name) != now.get(name)]:
        raise ValueError(
            f"{path} was made with other {', '.join(differing)}: name another file or folder"
        )
    return rows


def _told_options(options: Any) -> dict[str, Any]:
    fields = dict(options) if isinstance(options, Mapping) else dataclasses.asdict(options)
    return {name: _told(value) for name, value in fields.items()}


def _told(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_told(one) for one in value]
    if isinstance(value, Path):
        return value.name or value.resolve().name
    return _named(value) if isinstance(value, str) else value


def command() -> str:
    """The command line that runs; of absolute paths the last name."""
    spec = sys.modules["__main__"].__spec__
    words = [] if spec is None else ["-m", spec.name]
    words = ["python", *words, *(sys.argv[1:] if words else sys.argv)]
    return shlex.join(map(_named, words))


def _named(word: str) -> str:
    """A word of a command line, without the folders of a path that is told from the root on."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing that two records do not share and should, in words; None where there is none."""
    for name in KEPT:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for key in {**old, **new}:
                if key not in VARYING and old.get(key) != new.get(key):
                    return f"{name} ({key}) is {new.get(key)!r} and was {old.get(key)!r}"
        elif old != new:
            return f"{name} is {new!r} and was {old!r}"
    return None
