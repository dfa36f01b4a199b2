"""How commands show things: a console for tables, bars on standard error, rows as JSON."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tyro.conf import arg

JsonPath = Annotated[str | None, arg(metavar="[PATH]")]  # "-" is standard output


def console_of(width: int) -> Console:
    """Standard output: as wide as the terminal, or this wide where it is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """Bars on standard error, one a stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def check_json(path: str | None) -> None:
    """Refuses a path in a folder that does not exist, before anything is computed."""
    if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--json cannot write {path}: there is no folder {Path(path).absolute().parent}")


def write_json(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Writes one list of objects to a file, or to standard output for "-"."""
    text = json.dumps(rows, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
