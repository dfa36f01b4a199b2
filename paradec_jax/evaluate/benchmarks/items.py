"""Items of a benchmark, and files of records: JSON lines, gzipped JSON lines, or one JSON list."""

import dataclasses
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """One question to a model.

    Attributes:
      id: name of the item, the same in every run.
      prompt: what the model continues.
      stop: texts that end the continuation, which is cut before the first of them.
      reference: what the score needs: the right answer, or the tests that code must pass.
    """

    id: str
    prompt: str
    stop: tuple[str, ...]
    reference: str


@dataclasses.dataclass(frozen=True)
class Source:
    """Items, and where their examples come from.

    Attributes:
      items: in the order of the file.
      shots: solved examples before each question.
      examples: what those examples are, for the record of a result.
    """

    items: tuple[Item, ...]
    shots: int = 0
    examples: str = "none"


@dataclasses.dataclass(frozen=True)
class Record:
    """An object of a file, and the words that say where it stands."""

    values: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        """A field that holds a text.

        Raises:
          ValueError: no such field, or no text.
        """
        value = self._get(name)
        if not isinstance(value, str):
            raise ValueError(f'{self.where}: "{name}" must be a text, not {_kind(value)}')
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that holds a list of texts. Raises ValueError as `text` does."""
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError(f'{self.where}: "{name}" must be a list of texts, not {_kind(value)}')
        return tuple(value)

    def number(self, name: str) -> int:
        """A field that holds a whole number. Raises ValueError as `text` does."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f'{self.where}: "{name}" must be a whole number, not {_kind(value)}')
        return value

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f'{self.where}: the field "{name}" is missing')
        return self.values[name]


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The objects of a file: a list in .json, else one object a line, unpacked where the name ends in .gz.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file that is empty or unreadable, or a line that holds no object; the message names the line.
    """
    text = _read(Path(path))
    if Path(path).name.removesuffix(".gz").endswith(".json"):
        values = _parse(text, os.fspath(path))
        if not isinstance(values, list):
            raise ValueError(f"{os.fspath(path)}: expected a list of objects, not {_kind(values)}")
        numbered = [(f"item {i}", value) for i, value in enumerate(values)]
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        numbered = [(f"line {i}", _parse(line, f"{os.fspath(path)}, line {i}")) for i, line in lines]
    if not numbered:
        raise ValueError(f"{os.fspath(path)} holds no item")
    for place, value in numbered:
        if not isinstance(value, dict):
            raise ValueError(f"{os.fspath(path)}, {place}: expected an object, not {_kind(value)}")
    return [Record(value, f"{os.fspath(path)}, {place}") for place, value in numbered]


def distinct(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items, whose ids must differ because results are kept under them. Raises ValueError."""
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise ValueError(f"item {twice[0]} stands in the file more than once")
    return tuple(items)


def check_shots(shots: int, most: int, name: str) -> None:
    """Refuses a number of solved examples that a benchmark cannot give. Raises ValueError."""
    if not 0 <= shots <= most:
        allowed = f"0 to {most}" if most else "0"
        raise ValueError(f"shots must be {allowed} for {name}, not {shots}")


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg})") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
