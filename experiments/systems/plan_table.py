"""The plans that `scale_plan` wrote, as one table.

`python -m experiments.systems.plan_table` prints a line for each program of each record in a folder, the smaller mesh
first.
"""

import json
from pathlib import Path
from typing import Any

from experiments.common.command import run
from experiments.systems.plan_target import GIB

HEAD = (
    "model",
    "program",
    "chips, mesh",
    "rows x tokens",
    "GiB a chip",
    "Tflop a chip: done, asked",
    "collectives, GiB",
    "seconds: processor, wall",
)
SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}


def line(options: dict[str, Any], row: dict[str, Any], chips: int) -> tuple[str, ...]:
    """One program."""
    name = row["program"] if options["decode"] is None else f"{options['decode']}: {row['program']}"
    tera = [None if row[kind] is None else row[kind] / 1e12 for kind in ("products", "work")]
    through = row.get("collectives", {})
    return (
        options["preset"],
        name,
        f"{chips}, {options['mesh']}",
        f"{row['batch']} x {options['seq']}",
        f"{row['gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
        ", ".join("" if number is None else f"{number:.4g}" for number in tera),
        ", ".join(f"{SHORT[kind]} {one['bytes'] / GIB:.3g}" for kind, one in through.items()) or "none",
        f"{row['compile_processor_seconds']:.0f}, {row['compile_seconds']:.0f}",
    )


def main(folder: Path = Path("experiments/systems/results/plans")) -> None:
    """Prints the table, and the largest batches."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ValueError(f"{folder} holds no plans: make some with experiments.systems.scale_plan")
    records.sort(key=lambda record: (record["options"]["preset"], record["chips"]))
    lines = [HEAD, ("---",) * len(HEAD)]
    for record in records:
        lines += [line(record["options"], row, record["chips"]) for row in record["rows"]]
    for cells in lines:
        print(f"| {' | '.join(cells)} |")
    for record in records:
        for program, sizes in record.get("largest_batch", {}).items():
            told = ", ".join(f"{limit} {size}" for limit, size in sizes.items())
            print(f"{record['options']['preset']}, {record['chips']} chips, {program}, largest batch: {told}")


if __name__ == "__main__":
    run(main)
