"""Files of results: JSON lines, and tables as JSON with CSV beside them. Each file is written whole or not at all."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax.io import atomic_write_text


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Writes a file of JSON lines, whole or not at all."""
    atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def write_table(path: Path, result: Any, lines: Sequence[Mapping[str, Any]] | None) -> None:
    """Writes a result as JSON, and beside it its lines as CSV; each file whole or not at all.

    Args:
      path: of the JSON file; its folder is made where there is none.
      result: everything, as JSON values.
      lines: see `write_csv`; no CSV where None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(result, indent=1) + "\n")
    if lines is not None:
        write_csv(path.with_suffix(".csv"), lines)


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes lines as CSV, whole or not at all.

    The columns are all keys, in the order in which they come; what is itself a list or a dict has no place in a cell
    and is left out.
    """
    cells = [{k: v for k, v in line.items() if not isinstance(v, Mapping | list | tuple)} for line in lines]
    table = io.StringIO()
    writer = csv.DictWriter(
        table, list(dict.fromkeys(key for line in cells for key in line)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(cells)
    atomic_write_text(path, table.getvalue())
