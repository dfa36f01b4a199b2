"""Files of results: JSON lines that are written as they come, and tables that are written when all is known.

The first are a header line with the settings and what runs tell of their machines, then a line an item. A run that
was stopped goes on with the same file; a run of other settings is refused.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax.io import atomic_write_text

Line = dict[str, Any]
_TOLD = 3  # differences that an error names


class Results:
    """The lines of a file, by the ids of their items."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens or makes the file.

        Args:
          path: its folder must exist.
          settings: what decides the results, as JSON values.
          facts: of this run, as JSON values; the header has a list of those of all runs that added lines.

        Raises:
          ValueError: a file of other settings, or one that holds something else; nothing is changed then.
          FileNotFoundError: no such folder.
        """
        self.path = Path(path)
        self._header: dict[str, Any] = {"settings": json.loads(json.dumps(settings))}
        self._untold = facts
        self.lines: dict[str, Line] = {}
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self.path.absolute().parent} for {self.path}")
        if self.path.exists() and self.path.stat().st_size:
            self._read()
        else:
            write_lines(self.path, [self._header])

    def add(self, lines: Sequence[Line]) -> None:
        """Appends lines, each with the "id" of its item, and hands them to the disk."""
        if self._untold is not None:
            self._header["facts"] = [*self._header.get("facts", []), self._untold]
            self._untold = None
            self.rewrite()
        with self.path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                self.lines[line["id"]] = line
            file.flush()
            os.fsync(file.fileno())

    def change(self, lines: Sequence[Line]) -> None:
        """Puts lines in the place of those of the same items."""
        self.lines |= {line["id"]: line for line in lines}
        self.rewrite()

    def mine(self, items: Sequence[Any]) -> list[Any]:
        """The items of this process: all (see `parts.Parts`)."""
        return list(items)

    def merge(self, items: Sequence[Any], complete: Callable[[Line], bool]) -> bool:
        """Whether every item has a complete line; there is nothing to merge."""
        return all(item.id in self.lines and complete(self.lines[item.id]) for item in items)

    def close(self) -> None:
        """Nothing is held."""

    def rewrite(self) -> None:
        """Writes the file anew, whole or not at all, after lines were changed."""
        write_lines(self.path, [self._header, *self.lines.values()])

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
            whole, _, torn = text.rpartition("\n")  # a run killed while it wrote leaves half a line
            header, *lines = [json.loads(line) for line in whole.split("\n")]
            before = header["settings"]
            self.lines = {line["id"]: line for line in lines}
            self._header |= {"facts": header["facts"]} if "facts" in header else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} exists and is no file of results: name another one") from error
        refuse_others(self.path, before, self._header["settings"])
        if torn:
            self.rewrite()


def refuse_others(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that differ."""
    before, now = _flat(before), _flat(now)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        told = [f"{name} is {now.get(name)!r} and was {before.get(name)!r}" for name in names[:_TOLD]]
        more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
        raise ValueError(
            f"{path} was written with other settings: {'; '.join(told)}{more}; name another file"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of a setting beside it."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Writes a file of JSON lines, whole or not at all."""
    atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
