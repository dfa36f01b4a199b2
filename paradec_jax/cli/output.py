"""How commands show things: one kind of table, bars on standard error, rows as JSON."""

import contextlib
import json
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tyro.conf import arg

JsonPath = Annotated[str | None, arg(metavar="[PATH]")]  # "-" is standard output
WORDS = ("family", "model", "settings")  # columns of several words
WIDTH = 180  # characters of a line where the output is no terminal


def print_table(
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
    bold: int | None = None,
) -> None:
    """Prints rows of values and notes below them.

    Args:
      title: line above the table.
      columns: a format of fields by the column's title; a cell stays empty where one of its values is None.
      rows: values by field.
      notes: sentences, a line each.
      bold: index of the row in bold.
    """
    table = Table(title=title)
    cells = [[_cell(form, row) for form in columns.values()] for row in rows]
    for i, name in enumerate(columns):
        words, side = name in WORDS, "left" if name in (*WORDS, "decoder") else "right"
        pieces = [*name.split(), *([] if words else [line[i] for line in cells])]  # which are not broken
        table.add_column(name, justify=side, min_width=max(map(len, pieces)))  # type: ignore[arg-type]
    for i, line in enumerate(cells):
        table.add_row(*line, style="bold" if i == bold else None)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    console.print(table)
    for note in notes:
        console.print(note)


def _cell(form: str, row: Mapping[str, Any]) -> str:
    fields = [name for _, name, _, _ in string.Formatter().parse(form) if name]
    values = [string.Formatter().get_field(name, (), row)[0] for name in fields]
    return "" if None in values else form.format(**row)


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


def check_place(option: str, path: str | None) -> None:
    """Refuses a path of an option in a folder that does not exist, before anything is computed."""
    if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--{option} cannot write {path}: there is no folder {Path(path).absolute().parent}")


def write_json(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Writes one list of objects to a file, or to standard output for "-"."""
    text = json.dumps(rows, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
