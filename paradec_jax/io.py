"""Files that appear whole or not at all, folders of one writer, JSON and JSON lines of others, and
errors as one sentence.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

AnyPath = str | os.PathLike[str]  # of a file or folder
HOLDER = ".holder"  # of a folder that one process at a time writes to (`hold`)
MOST_CHARACTERS = 290  # of a sentence about wrong input; commands put their name before it
# What input that is wrong may raise: errors of ours, and what no check of ours foresaw.
WRONG_INPUT = (ValueError, OSError, MemoryError, RecursionError, OverflowError)


def one_sentence(error: BaseException | str, most: int = MOST_CHARACTERS) -> str:
    """What an error says, in one line of printable characters; of a long one the middle is left
    out.
    """
    text = " ".join(str(error).split())
    if not text:
        text = "not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    text = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def regular(path: AnyPath) -> Path:
    """The path of a regular file, or of a link to one, which can be opened without waiting for a
    writer.

    Raises:
      ValueError: a pipe, a device, a socket or a folder.
      FileNotFoundError: nothing stands there.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.fspath(path)} is no regular file")
    return Path(path)


def text_of(path: Path, most: int = 2**26) -> str:
    """The text of a regular file of at most so many bytes, UTF-8 with or without a byte order mark.

    Raises:
      ValueError: another file.
      OSError: a file that cannot be read.
    """
    if (size := regular(path).stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes, and {most} are allowed")
    return path.read_bytes().decode("utf-8-sig")


def read_object(path: Path, finite: bool = False) -> dict[str, Any]:
    """The object in a JSON file, UTF-8 with or without a byte order mark; `finite` refuses NaN and
    infinities in it.

    Raises:
      ValueError: a file that is no JSON, or holds anything else.
      OSError: a file that cannot be read.
    """

    def number(text: str) -> float:
        if finite and not math.isfinite(float(text)):
            raise ValueError(f"{text} is no finite number")
        return float(text)

    try:
        value = json.loads(text_of(path, 2**24), parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object")
    return value


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_lines(path: AnyPath, *strings: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, one at a time, each after the number of its line, which
    counts from 1.

    A line ends at a line feed alone, so a text may hold any other separator. Blank lines are left
    out. The file is UTF-8, with or without a byte order mark. Each object must have strings in the
    fields named by `strings`.

    Raises:
      ValueError: a line that is not UTF-8, not JSON, no object, or lacks such a field; the message
        names the line.
      OSError: a file that cannot be read.
    """
    with regular(path).open("rb") as file:
        for number, data in enumerate(file, 1):
            value = json_line(data, where := f"line {number} of {os.fspath(path)}")
            if value is None:
                continue
            for name in strings:
                if not isinstance(value.get(name), str):
                    raise ValueError(f'{where} lacks "{name}", which must be a string')
            yield number, value


def json_line(data: bytes, where: str) -> dict[str, Any] | None:
    """The object of one line, None of a blank one. Raises ValueError, whose message begins with
    `where`.
    """
    try:
        line = data.decode("utf-8-sig").strip(" \t\r\n")
        value = json.loads(line) if line else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from error
    # A number of too many digits, or lists nested too deep.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if line and not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, not an object")
    return value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, which takes its place when the block ends well; its folder must
    exist.

    A reader, or the next process after a kill, finds the old file or the new one. On an error the
    old one stays.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: AnyPath, text: str) -> None:
    """Writes a file of UTF-8 text, whole or not at all, in the place of one that is there
    (`replacing`).
    """
    with replacing(Path(path)) as file:
        file.write(text.encode())


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """The folder, made if missing, is this block's alone, until the block ends or the process dies.

    FOLDER/.holder is locked by the system (`flock`), and names the process. Where system or file
    system have no locks, nobody is refused.

    Raises:
      OSError: another has the lock, or FOLDER/.holder is not of `hold`, or a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder_of(folder)
    # No link is followed to a file of somebody's.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(folder / HOLDER, flags, 0o666), "wb", 0) as file:
        try:
            import fcntl  # POSIX only

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = f"{holder_of(folder)} is writing to {folder}"
            raise OSError(f"{other}: wait for its end, or choose another folder") from None
        except (ImportError, OSError):
            pass
        file.truncate()
        file.write(f"process {os.getpid()} on {platform.node()}".encode())
        yield


def holder_of(folder: Path) -> str:
    """The process that last held a folder, empty where none is known. Raises OSError for a file of
    another kind.
    """
    path = folder / HOLDER
    text = text_of(path) if path.exists() else ""
    if path.is_symlink() or (text and not text.startswith("process ")):
        raise OSError(f"{path} exists, and no run wrote it, or it is a link: choose another folder")
    return text
