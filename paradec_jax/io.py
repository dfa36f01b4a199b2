"""Files that appear whole or not at all, JSON and JSON lines of strangers, and errors as one sentence."""

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_JSON = 16 * 2**20  # bytes; a config.json with the digests of 140 GB has 0.6 MB
MOST_CHARACTERS = 290  # of a sentence about wrong input; commands put their name before it
# What input that is wrong may raise: errors of ours, and what no check of ours foresaw.
WRONG_INPUT = (ValueError, OSError, MemoryError, RecursionError, OverflowError)


def one_sentence(error: BaseException | str, most: int = MOST_CHARACTERS) -> str:
    """What an error says, in one line of printable characters; of a long one the middle is left out."""
    told = " ".join(str(error).split())
    if not told:
        told = "not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    told = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in told)
    if len(told) <= most:
        return told
    end = most // 3
    return f"{told[: most - end - 5]} ... {told[-end:]}"


def read_object(path: Path, most_bytes: int = MOST_JSON) -> dict[str, Any]:
    """The object in a JSON file that somebody else wrote, UTF-8 with or without a byte order mark.

    Raises:
      ValueError: a file that is too large, no JSON, nested too deep, or holds anything else.
      OSError: when it cannot be read.
    """
    size = path.stat().st_size
    if size > most_bytes:
        raise ValueError(f"{path} has {size} bytes, but a file of its kind has at most {most_bytes}")
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON for us (nested too deep)") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object")
    return value


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, one at a time, each after the number of its line, which counts from 1.

    A line ends at a line feed alone, so a text may hold any other separator. Blank lines are left out. The file is
    UTF-8, with or without a byte order mark.

    Raises:
      ValueError: a line that is not UTF-8, not JSON, or no object; the message names the line.
      OSError: when the file cannot be read.
    """
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            where = f"line {number} of {os.fspath(path)}"
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where} is not UTF-8: {error.reason} at byte {error.start + 1} of the line"
                ) from error
            line = line.removesuffix("\n").removesuffix("\r")
            if not line.strip(" \t\r"):
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error.msg} (character {error.pos + 1})") from error
            except RecursionError as error:
                raise ValueError(f"{where} is not JSON for us: it is nested too deep") from error
            except ValueError as error:  # a number of more digits than Python reads
                raise ValueError(f"{where} is not JSON for us: {error}") from error
            if not isinstance(value, dict):
                raise ValueError(f"{where} is {_kind(value)}, not an object")
            yield number, value


def string_in(record: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an object that must hold a string.

    Args:
      record: the object.
      name: the field.
      where: the words for the object in an error, as "line 3 of FILE".

    Raises:
      ValueError: no such field, or another value.
    """
    if name not in record:
        raise ValueError(f'{where} lacks "{name}"')
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f'{where}: "{name}" must be a string, not {_kind(value)}')
    return value


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8 text to a file beside `path`, which then takes its place; its folder must exist.

    Whoever reads `path` meanwhile, or after a kill, finds the old file or the new one. On an error the old one stays
    and nothing is left beside it; what a killed writer left goes with the next write.
    """
    path = Path(path)
    clear_leftovers(path, r"[0-9a-f]{32}")

    def make() -> Path:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        temporary.touch(exist_ok=False)
        return temporary

    with claimed(make) as temporary:
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(make: Callable[[], Path]) -> Iterator[Path]:
    """What `make` makes, a file or a folder, locked until the block ends or the process dies.

    So a later writer knows which leftovers nobody works on. Where the file system has no locks, none is known to.
    """
    while True:
        path = make()
        with contextlib.suppress(
            FileNotFoundError, BlockingIOError
        ):  # another took it for a leftover: once more
            descriptor = os.open(path, os.O_RDONLY)
            try:
                with contextlib.suppress(NoLocks):
                    lock(descriptor)
                if path.exists():
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    try:
        yield path
    finally:
        os.close(descriptor)


def clear_leftovers(path: Path, mark: str) -> None:
    """Removes siblings `.NAME.MARK` of `path` that a dead writer left; `mark` is a regular expression.

    A folder `.NAME.MARK.old` is what `path` was before a writer died between two renames: it takes its place again
    where nothing else has.
    """
    if not path.parent.is_dir():
        return
    ours = re.compile(rf"\.{re.escape(path.name)}\.{mark}")
    for name in os.listdir(path.parent):
        if ours.fullmatch(name):
            with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError, NoLocks):
                _clear(path.with_name(name), path)


def _clear(leftover: Path, path: Path) -> None:
    descriptor = os.open(leftover, os.O_RDONLY)
    try:
        lock(descriptor)
        if leftover.suffix == ".old" and not path.exists():
            leftover.rename(path)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()
    finally:
        os.close(descriptor)


class NoLocks(OSError):
    """The file system, or the system, has no locks."""


def lock(descriptor: int) -> None:
    """Locks a file or folder for as long as its descriptor is open.

    Raises:
      BlockingIOError: another has the lock.
      NoLocks: there are none.
    """
    try:
        import fcntl  # of POSIX alone

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError) as error:
        raise NoLocks from error
