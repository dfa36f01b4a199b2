"""How commands show things: one kind of table, bars on standard error, rows as JSON."""

import contextlib
import json
import os
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tyro.conf import arg

from paradec_jax.disk.folders import ASSETS
from paradec_jax.io import atomic_write_text, text_of

JsonPath = Annotated[str | None, arg(metavar="[PATH]")]  # "-" is standard output
WORDS = ("family", "model", "settings")  # columns of several words
# Of a page, and what its trace is written over.
TEMPLATE, PLACE = ASSETS / "replay.html", "{}<!--trace-->"
ROW = {"model", "decoder", "label", "seed", "facts"}  # what a row of --json has, among others
# Whether a text is what an option writes.
OWN: dict[str, Callable[[str], Any]] = {
    "json": lambda text: (rows := json.loads(text)) and all(row.keys() >= ROW for row in rows),
    "html": lambda text: text.startswith(text_of(TEMPLATE).partition(PLACE)[0]),
}
WIDTH = 200  # characters of a line where the output is no terminal


def print_table(
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> None:
    """Prints rows of values and notes below them; the row that is the `baseline` in bold.

    Args:
      title: line above the table, a format of the fields of the baseline, or else of the first row.
      columns: formats of a row's fields by the column's title; a cell with a value of None stays
        empty, and a column of such cells is left out.
      rows: values by field.
      notes: sentences, formats as the title is; one with a value of None is left out.
    """
    base = next((row for row in rows if row.get("baseline")), rows[0])
    table = Table(title=_filled(title, base))
    columns = {
        name: form for name, form in columns.items() if any(_filled(form, row) for row in rows)
    }
    cells = [[_filled(form, row) for form in columns.values()] for row in rows]
    for i, name in enumerate(columns):
        words, side = name in WORDS, "left" if name in (*WORDS, "decoder") else "right"
        # Pieces that are not broken.
        pieces = name.split() + ([] if words else [line[i] for line in cells])
        table.add_column(name, justify=side, min_width=max(map(len, pieces)))  # type: ignore[arg-type]
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, style="bold" if row.get("baseline") else None)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    for note in filter(None, (_filled(note, base) for note in notes)):
        console.print(note)


def _filled(form: str, row: Mapping[str, Any]) -> str:
    """A format with its values, empty where one of them is None."""
    fields = [name for _, name, _, _ in string.Formatter().parse(form) if name]
    if None in [row[name.partition("[")[0]] for name in fields]:
        return ""
    values = [string.Formatter().get_field(name, (), row)[0] for name in fields]
    return "" if None in values else form.format(**row)


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """Bars on standard error, one a stage; what is yielded is an `evaluate.compare.Report`."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bars:

        def report(stage: str, units: int) -> Any:
            task = bars.add_task(stage, total=units)
            return lambda done: bars.advance(task, done)

        yield report


def check_place(option: str, path: str | None) -> None:
    """Refuses a path of an option in no folder, or where another's file stands, before anything is
    computed.
    """
    if path is None or (path, option) == ("-", "json"):
        return
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ValueError(f"--{option} cannot write {path}: there is no folder {place.parent}")
    with contextlib.suppress(Exception):  # whatever text may stand there
        if not os.path.lexists(place) or (not place.is_symlink() and OWN[option](text_of(place))):
            return
    raise ValueError(
        f"--{option} cannot write {path}: {place} exists and is not what this option writes"
    )


def write_json(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Writes one list of objects to a file, or to standard output for "-"."""
    text = json.dumps(rows, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        atomic_write_text(path, text)
