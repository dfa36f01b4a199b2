"""What the rows of the one table would write on a device: a projection, not a measurement.

    python -m experiments.families.projection slot/variants.json

::

    tokens a second = 1 / (c T(p))        c calls a token, p positions a call, T seconds a call

c and p are counts of `results/table.json`, prompts included; T is what a call of a shape took there
at batch 1 under the quickest flags (`experiments.systems.slot`), linear between the numbers of
positions that were timed and constant beyond them. A model's answers are not those of the shape:
the row says what its calls would cost if they were. Rows with calls of other kinds, recurrences or
a residual head's, are left out.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from experiments.common.command import run
from experiments.common.record import write_record
from paradec_jax.cli.output import print_table

COLUMNS = {
    "method": "{method}",
    "tokens a call": "{tokens_per_network_call:.2f}",
    "positions a call": "{positions:.1f}",
    "tokens a second": "{tokens_per_second:,.0f}",
    "over one by one": "{speedup:.2f}x",
}
KEPT = [
    "shape",
    "method",
    "tokens_per_network_call",
    "positions",
    "tokens_per_second",
    "speedup",
]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is projected.

    Attributes:
      calls: seconds of calls on a device, as the slot's part a writes them.
      table: the one table.
    """

    calls: Positional[Path]
    table: Path = Path("experiments/families/results/table.json")


def projected(rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of plain calls with their tokens a second at one shape; the first is the baseline."""
    points = {row["positions"]: min(row["milliseconds"].values()) for row in timed}
    at = sorted(points)
    found = []
    for row in rows:
        if row["family"] == "recurrent_depth" or row["head_calls_per_token"]:
            continue
        positions = row["positions_per_token"] * row["tokens_per_network_call"]
        seconds = np.interp(positions, at, [points[n] for n in at]) / 1e3
        row |= {"positions": positions, "shape": timed[0]["shape"]}
        found.append(row | {"tokens_per_second": 1 / (row["network_calls_per_token"] * seconds)})
    for row in found:
        row["speedup"] = row["tokens_per_second"] / found[0]["tokens_per_second"]
    return found


def main(options: Options) -> None:
    """Prints a table a shape and writes all of them beside the calls."""
    table, calls = (json.loads(path.read_text())["rows"] for path in (options.table, options.calls))
    alone = [row for row in calls if row["batch"] == 1]
    rows = []
    for shape in dict.fromkeys(row["shape"] for row in alone):
        made = projected(table, [row for row in alone if row["shape"] == shape])
        print_table("projection: calls of {shape}", COLUMNS, made, [])
        rows += [{name: row[name] for name in KEPT} for row in made]
    write_record(options.calls.with_name("projection.json"), options, {"rows": rows})


if __name__ == "__main__":
    run(main)
