"""Results that several processes write, a part each, and that become one file whole or not at all.

::

    out.jsonl                  what is merged, as `Results` writes it
    out.jsonl.part-0, -1, ..   what each process has added since; a kill leaves half a line at most
    .out.jsonl.part-0.lock     held by the process that adds to the part

Item i belongs to process i mod N. What is done is read from all of them, whatever N they were written with, so
nothing is lost or doubled when a run goes on with another number of processes. Parts say which items were asked for,
and are refused where these differ; the merged file does not, so a later run may ask for more.

Whoever merges removes its own part and those that nobody holds. A process that is still there merges once more with
its own; where the file system has no locks, parts of others stay until they do.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax.evaluate.results import Line, Results, refuse_others, write_lines
from paradec_jax.io import NoLocks, lock

_MERGED = 1.0  # seconds in which another has merged a part that it holds for that alone


def results_of(
    path: str | os.PathLike[str],
    settings: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    *,
    process: int = 0,
    processes: int = 1,
    asked: Mapping[str, Any] | None = None,
) -> "Results | Parts":
    """The file itself for one process, unless several have left parts; a part of it for one of several.

    Args:
      path, settings, facts, process, processes, asked: as for `Parts`.

    Raises:
      ValueError, FileNotFoundError: as `Parts`.
    """
    check_numbers(process, processes)
    path = Path(path)
    if processes == 1 and not (path.absolute().parent.is_dir() and parts_of(path)):
        return Results(path, settings, facts)
    return Parts(path, settings, facts, process=process, processes=processes, asked=asked)


class Parts:
    """The lines of a file by the ids of their items, as `Results`, of which this process adds to a part.

    Args:
      path: of the file.
      settings, facts: as for `Results`.
      process: which this one is.
      processes: how many there are.
      asked: what decides which items there are, as JSON values: settings of the parts, not of the merged file.

    Raises:
      ValueError: numbers that do not fit, a living process of the same number, or what `Results` refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        *,
        process: int = 0,
        processes: int = 1,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        check_numbers(process, processes)
        self.path, self._process, self._processes = Path(path), process, processes
        self._settings, self._facts = json.loads(json.dumps(settings)), facts
        self._asked = self._settings | json.loads(json.dumps(asked or {}))
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self.path.absolute().parent} for {self.path}")
        self._part = self.path.with_name(f"{self.path.name}.part-{process}")
        until = time.monotonic() + _MERGED
        while (held := _locked(_lock_of(self._part))) is None and time.monotonic() < until:
            time.sleep(0.05)
        self._lock = held
        if held is None:
            raise ValueError(f"--process {process} runs already: wait for its end, or give another number")
        self.lines: dict[str, Line] = {}
        try:
            self.refresh()
            self._own = Results(self._part, self._asked, facts) if self._part.exists() else None
        except BaseException:
            self.close()
            raise

    def mine(self, items: Sequence[Any]) -> list[Any]:
        """The items of this process, done or not."""
        return [item for i, item in enumerate(items) if i % self._processes == self._process]

    def add(self, lines: Sequence[Line]) -> None:
        """Appends lines to the part, each with the "id" of its item, and takes them for what these items have.

        Where files have several lines of an item, `refresh` takes the first with a score: of parts before the merged
        file, and in each from its beginning; of lines without one the last.
        """
        if self._own is None or not self._part.exists():  # another has merged it
            self._own = Results(self._part, self._asked, self._facts)
        self._own.add(lines)
        self.lines |= {line["id"]: line for line in lines}

    change = add

    def refresh(self) -> None:
        """Reads what all processes have done so far."""
        self.lines = {}
        self._told: list[Any] = []
        # The merged file last: whoever merges writes it before it removes the parts.
        for path in [*self._parts(), self.path]:
            for header, lines in _read(path):
                refuse_others(path, header["settings"], self._settings if path == self.path else self._asked)
                self._told = [*header.get("facts", []), *self._told]
                for line in lines:
                    before = self.lines.get(line["id"])
                    if before is None or before.get("score") is None:
                        self.lines[line["id"]] = line

    def merge(self, items: Sequence[Any], complete: Callable[[Line], bool]) -> bool:
        """Makes one file of all where every item has a complete line; otherwise says False and changes nothing."""
        if not self._complete(items, complete):
            return False
        with contextlib.ExitStack() as stack:
            # Held from before they are read until they are gone, so that nobody adds to one meanwhile.
            parts = self._parts()
            free = [part for part in parts if part == self._part or _free(part, stack)]
            if not self._complete(items, complete):
                return False
            if parts:
                ids = dict.fromkeys([*(item.id for item in items), *self.lines])
                facts = [fact for i, fact in enumerate(self._told) if fact not in self._told[:i]]
                header = {"settings": self._settings, "facts": facts}
                write_lines(self.path, [header, *(self.lines[name] for name in ids)])
                for part in free:
                    part.unlink(missing_ok=True)
                self._own = None
        return True

    def _complete(self, items: Sequence[Any], complete: Callable[[Line], bool]) -> bool:
        self.refresh()
        return all(item.id in self.lines and complete(self.lines[item.id]) for item in items)

    def close(self) -> None:
        """Lets another process of this number begin."""
        if self._lock is not None:
            _unlock(_lock_of(self._part), self._lock)
            self._lock = None

    def _parts(self) -> list[Path]:
        return parts_of(self.path)


def check_numbers(process: int, processes: int) -> None:
    """Raises ValueError for a process that is none of them."""
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"--process must be from 0 to {processes - 1} of --processes {processes}, not {process}"
        )


def parts_of(path: Path) -> list[Path]:
    """The parts of a file that are there."""
    ours = re.compile(rf"{re.escape(path.name)}\.part-\d+")
    return [
        path.with_name(name) for name in sorted(os.listdir(path.absolute().parent)) if ours.fullmatch(name)
    ]


def _lock_of(part: Path) -> Path:
    return part.with_name(f".{part.name}.lock")


def _locked(path: Path, sure: bool = False) -> int | None:
    """The descriptor of a lock that is ours now; None where another has it or, if we must be `sure`, nobody can."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except NoLocks:
            if not sure:
                return descriptor
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # who had it before has removed the file: once more


def _unlock(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _free(part: Path, stack: contextlib.ExitStack) -> bool:
    """Whether no living process adds to a part; none can until the stack is left."""
    descriptor = _locked(_lock_of(part), sure=True)
    if descriptor is not None:
        stack.callback(_unlock, _lock_of(part), descriptor)
    return descriptor is not None


def _read(path: Path) -> Iterator[tuple[dict[str, Any], list[Line]]]:
    """Header and whole lines of a file that another may be writing; nothing where it is gone or has no header yet."""
    with contextlib.suppress(FileNotFoundError):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        if whole:
            try:
                header, *lines = [json.loads(line) for line in whole.split("\n")]
                header["settings"], [line["id"] for line in lines]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} exists and is no file of results: name another one") from error
            yield header, lines
