"""The plans of large models as one table: what `scale_plan` wrote, and what it has not computed yet.

`python -m experiments.systems.plan_table` prints the table of a folder. With `--make` it computes first what
is missing, one after the other, each in a process of its own; a compilation takes minutes. The same command goes on.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run
from experiments.systems.plan_target import GIB, LIMITS
from experiments.systems.scale_plan import largest_of

CHIPS = {1: "v5p:2x2x1", 8: "v5p:2x2x2", 64: "v5p:4x4x4", 256: "v5p:4x8x8"}
SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
HEAD = (
    "model",
    "program",
    "chips, mesh",
    "rows x tokens",
    "GiB a chip",
    "Tflop a chip: done, asked",
    "collectives, GiB a chip",
    "compilation, s: processor, wall",
    "largest batch: " + ", ".join(LIMITS),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A plan of the table: a row a chip for the train step and for decoding.

    Attributes:
      preset, chips, seq, decode: of `scale_plan`; `decode` None for the train step.
      tensor: devices that share heads; the others share rows, and when training the parameters too.
      rows: of the batch; one a chip when None.
      largest: whether the largest batch is looked for, by a second compilation.
    """

    preset: str
    chips: int
    seq: int
    decode: str | None = None
    tensor: int = 1
    rows: int | None = None
    largest: bool = False

    @property
    def name(self) -> str:
        """Of the record, without its ending."""
        return f"{self.preset}-{self.decode or 'train'}-{self.chips}"

    @property
    def mesh(self) -> str:
        """As `scale_plan` takes it."""
        others = self.chips // self.tensor
        fsdp = 1 if self.decode else min(others, MOST_FSDP.get(self.preset, others))
        sizes = {"data": others // fsdp, "fsdp": fsdp, "tensor": self.tensor}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"

    def words(self, folder: Path) -> list[str]:
        """Of the command that makes the record."""
        words = [self.preset, "--target", CHIPS[self.chips], "--mesh", self.mesh, "--seq", str(self.seq)]
        words += ["--batch", str(self.rows or self.chips), "--out", str(folder / f"{self.name}.json")]
        words += ["--decode", self.decode] if self.decode else []
        return words + ["--largest"] * self.largest


MOST_FSDP = {"huginn-0125": 32}  # its width, 5280, is 32 * 165
# A tensor axis as far as the key-value heads of the model divide; Huginn's 55 heads divide by none.
DECODING = {
    "huginn-0125": ("wavefront", 1, 4000),
    "qwen2.5-coder-7b": ("jacobi", 4, 4096),
    "sdar-8b": ("block", 8, 4096),
    "mdlm-8b": ("masked", 8, 960),
}
CELLS = [Cell("huginn-0125", 1, 4000, "autoregressive", rows=8)]
for _chips in (8, 64, 256):
    for _preset, (_decoder, _tensor, _seq) in DECODING.items():
        _length = 1024 if _preset == "mdlm-8b" else 4096
        CELLS.append(Cell(_preset, _chips, _length, largest=True))
        CELLS.append(Cell(_preset, _chips, _seq, _decoder, _tensor, largest=True))


@dataclasses.dataclass(frozen=True)
class Options:
    """What to show.

    Attributes:
      folder: of the records.
      make: whether to compute what is missing.
      only: presets to compute; all when None.
    """

    folder: Path = Path("experiments/systems/results/plans")
    make: bool = False
    only: tuple[str, ...] | None = None


def made(cell: Cell, path: Path) -> bool:
    """Whether a record has all that the cell asks for."""
    return path.exists() and (not cell.largest or "largest_batch" in json.loads(path.read_text("utf-8")))


def make(options: Options) -> None:
    """Computes what is missing; what fails says so and is passed over."""
    for cell in CELLS:
        path = options.folder / f"{cell.name}.json"
        if made(cell, path) or (options.only is not None and cell.preset not in options.only):
            continue
        print(f"{cell.name} ..", flush=True)
        words = [sys.executable, "-m", "experiments.systems.scale_plan", *cell.words(options.folder)]
        if code := subprocess.run(words, check=False).returncode:
            print(f"{cell.name} ended with code {code}", flush=True)


def lines(cell: Cell, folder: Path) -> list[tuple[str, ...]]:
    """A line for each program of a cell, or one that says that there is none."""
    path = folder / f"{cell.name}.json"
    if not path.exists():
        program = cell.decode or "train step"
        head = (cell.preset, program, f"{cell.chips}, {cell.mesh}", f"{cell.rows or cell.chips} x {cell.seq}")
        return [(*head, "not computed", *("",) * (len(HEAD) - 5))]
    record = json.loads(path.read_text(encoding="utf-8"))
    options = record["options"]
    found = [row for row in record["rows"] if row["batch"] == options["batch"]]
    twice = [row for row in record["rows"] if row["batch"] != options["batch"]]
    sizes = dict(size.split("=") for size in options["mesh"].split(","))
    largest = largest_of(found, twice, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1)))
    return [line(options, row, record, largest.get(row["program"], {})) for row in found]


def line(
    options: dict[str, Any], row: dict[str, Any], record: dict[str, Any], largest: dict[str, int]
) -> tuple[str, ...]:
    """One program."""
    name = row["program"] if options["decode"] is None else f"{options['decode']}: {row['program']}"
    tera = [None if row[kind] is None else row[kind] / 1e12 for kind in ("products", "work")]
    through = row.get("collectives", {})
    none = "not computed" if row["products"] else "none"
    return (
        options["preset"],
        name,
        f"{record['chips']}, {options['mesh']}",
        f"{row['batch']} x {options['seq']}",
        f"{row['gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
        ", ".join("" if number is None else f"{number:.4g}" for number in tera),
        ", ".join(f"{SHORT[kind]} {one['bytes'] / GIB:.3g}" for kind, one in through.items()) or "none",
        f"{row['compile_processor_seconds']:.0f}, {row['compile_seconds']:.0f}",
        ", ".join(str(size) for size in largest.values()) or none,
    )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Computes what is asked for, and prints the table."""
    if options.make:
        options.folder.mkdir(parents=True, exist_ok=True)
        make(options)
    table = [HEAD, ("---",) * len(HEAD)]
    for cell in sorted(CELLS, key=lambda cell: (cell.preset, cell.chips, cell.decode is not None)):
        table += lines(cell, options.folder)
    for cells in table:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    run(main)
