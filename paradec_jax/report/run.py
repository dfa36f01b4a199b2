"""Measures the parts of a report inside a budget of minutes, each once, and writes the report after each."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax import facts
from paradec_jax.io import atomic_write_text
from paradec_jax.report.claims import CLAIMS
from paradec_jax.report.judging import Claim, judged
from paradec_jax.report.parts import Part, Progress, Task
from paradec_jax.report.registry import PARTS
from paradec_jax.report.sizes import Sizes, sizes_here
from paradec_jax.report.write import write_report

FOLDER = "parts"  # of the files that parts leave behind


def report(
    out: Path,
    *,
    minutes: float = 20.0,
    names: Sequence[str] = (),
    sizes: Sizes | None = None,
    parts: Mapping[str, Part] = PARTS,
    claims: Sequence[Claim] = CLAIMS,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """Measures what is missing of a report, writes the whole of it, and returns the judged claims.

    Each part leaves a file behind when it is done; the same call again measures none of them twice. A part that was
    cut for want of time is measured anew where its share is more seconds than it was, because there are more minutes
    or fewer parts.

    Args:
      out: the folder of the report; made where there is none.
      minutes: for all parts together; each gets its share, and what one leaves goes to those after it.
      names: parts to measure; all when there is none. The report shows those measured before as well.
      sizes: how large everything is; what suits the device when None.
      parts: by name, in the order of their importance.
      claims: what is judged.
      progress: told what is done.

    Raises:
      ValueError: an unknown part, no time, or files of another device, commit or size in the folder; nothing is
        changed then.
      RuntimeError: a part failed; all others were measured and written.
    """
    if unknown := [name for name in names if name not in parts]:
        raise ValueError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(parts)}")
    if not minutes > 0:
        raise ValueError(f"minutes must be above 0, not {minutes}")
    sizes = sizes_here() if sizes is None else sizes
    now = facts.facts()
    records = read(out, parts, now, sizes)
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    asked = [part for name, part in parts.items() if not names or name in names]
    shares = sum(part.share for part in asked)
    due = {part.name: 60 * minutes * part.share / shares for part in asked}
    todo = [part for part in asked if wanted(records.get(part.name), due[part.name])]
    finish = time.monotonic() + 60 * minutes
    failed: dict[str, Exception] = {}
    for done, part in enumerate(todo):
        progress("parts", done, len(todo))
        share = part.share / sum(other.share for other in todo[done:])
        try:
            record = measured(part, sizes, (finish - time.monotonic()) * share, due[part.name], progress)
        except Exception as error:  # the other parts are worth their time all the same
            failed[part.name] = error
            continue
        records[part.name] = record
        atomic_write_text(_file(out, part.name), json.dumps(records[part.name], indent=1) + "\n")
        write_report(out, parts, records, judge(claims, records))
    progress("parts", len(todo), len(todo))
    found = judge(claims, records)
    write_report(out, parts, records, found)
    for name, cause in failed.items():
        raise RuntimeError(f"the report lacks {', '.join(failed)}: part {name} failed") from cause
    return found


def measured(part: Part, sizes: Sizes, seconds: float, due: float, progress: Progress) -> dict[str, Any]:
    """The file of one part, which gets so many seconds: those of its share, and what parts before it left."""
    record = {
        "part": part.name,
        "facts": facts.facts(),
        "sizes": as_read(sizes),
        "due": due,
        "given": seconds,
    }
    start = time.monotonic()
    task = Task(sizes, start + seconds, progress, part.name)
    result = part.measure(task)
    found = {
        "seconds": time.monotonic() - start,
        "dtypes": sorted(task.dtypes),
        "cut": [dataclasses.asdict(cut) for cut in task.cut],
    }
    return record | found | {"late": task.late, "result": result}


def judge(claims: Sequence[Claim], records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The claims, judged by the results of the parts that there are."""
    return judged(claims, {name: record["result"] for name, record in records.items()})


def wanted(record: Mapping[str, Any] | None, due: float) -> bool:
    """Whether a part is to be measured: it never was, or it lacked time and its share is more seconds now."""
    return record is None or (record["late"] and due > record["due"])


def read(
    out: Path, parts: Mapping[str, Part], now: Mapping[str, Any], sizes: Sizes
) -> dict[str, dict[str, Any]]:
    """The files that parts have left in a folder, by name.

    Raises:
      ValueError: one of them is of another device, commit or size than would be measured now, or no such file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out is a folder")
    found = {}
    for name in parts:
        path = _file(out, name)
        if not path.exists():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            before, its_sizes, *_ = (record[key] for key in ("facts", "sizes", "due", "late", "result"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no part of a report ({error}): name another folder") from error
        other = facts.difference(before, now) or _changed(its_sizes, as_read(sizes))
        if other:
            raise ValueError(f"{path} was measured under other conditions: {other}; name another folder")
        found[name] = record
    return found


def as_read(sizes: Sizes) -> dict[str, Any]:
    """Sizes as JSON hands them back."""
    return json.loads(json.dumps(sizes.to_dict()))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name} is {now.get(name)!r} and was {before.get(name)!r}"
    return None


def _file(out: Path, name: str) -> Path:
    return out / FOLDER / f"{name}.json"
