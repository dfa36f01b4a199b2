"""Learning curves from the logs of trainings, `python -m experiments.common.curves --logs FILE`.

A picture shows one model: the logs of its runs one after the other, one panel a column.

    python -m experiments.common.curves --logs runs/mine/metrics.jsonl --columns loss accuracy --out
    mine.png
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run
from experiments.common.plots import picture
from paradec_jax.io import json_lines


@dataclasses.dataclass(frozen=True)
class Options:
    """What to draw.

    Attributes:
      logs: `metrics.jsonl` of runs that went on from one another.
      columns: of the logs, one panel each.
      out: path of the picture.
    """

    logs: tuple[Path, ...]
    columns: tuple[str, ...] = ("loss", "accuracy")
    out: Path = Path("curve.png")


def read(paths: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """The lines of each log."""
    found = []
    for path in paths:
        found.append([line for _, line in json_lines(path)])
        if not found[-1]:
            raise ValueError(f"{path} is empty")
    return found


def series(
    runs: Sequence[list[dict[str, Any]]], column: str
) -> list[tuple[list[int], list[float]]]:
    """Of each run (updates counted through all runs, values), where the column is there."""
    found, before = [], 0
    for lines in runs:
        points = [(before + line["step"], line[column]) for line in lines if column in line]
        if not points:
            known = ", ".join(sorted(name for name in lines[-1] if name != "step"))
            raise ValueError(f"a log has no column {column}; there are {known}")
        found.append(([step for step, _ in points], [value for _, value in points]))
        before += max(line["step"] for line in lines)
    return found


def draw(runs: Sequence[list[dict[str, Any]]], columns: Sequence[str], out: Path) -> None:
    """One panel a column, one colour a run; losses on a logarithmic axis."""
    with picture(out, (4.6 * len(columns), 3.2)) as figure:
        panels = figure.subplots(1, len(columns), squeeze=False)[0]
        for panel, column in zip(panels, columns, strict=True):
            for steps, values in series(runs, column):
                panel.plot(steps, values, linewidth=1)
            if "accuracy" not in column and column != "agreement":
                panel.set_yscale("log")
            panel.set_xlabel("update")
            panel.set_title(column.replace("_", " "))
            panel.grid(alpha=0.3)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Draws and names the picture."""
    draw(read(options.logs), options.columns, options.out)
    print(options.out)


if __name__ == "__main__":
    run(main)
