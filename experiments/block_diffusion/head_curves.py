"""How far heads are from their backbones while they are trained.

From the logs of `train_head`: the divergence of corrected scores over that of uncorrected ones on held-out text,
which is 1 for a head that adds nothing, in all and after each step. Heads of both grounds, as many as there are:

    python -m experiments.block_diffusion.head_curves --names tiny-head init-released init-ordinary
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.block_diffusion.train_head import RECIPES
from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels
from experiments.common.record import write_record
from paradec_jax.io import json_lines

RATIO = "eval/kl_ratio"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to read.

    Attributes:
      names: of runs; those of all recipes that have been begun when empty.
      runs: folder of the runs.
      out: where the JSON goes; the picture goes to `figures` beside its folder.
    """

    names: tuple[str, ...] = ()
    runs: Path = Path("runs")
    out: Path = Path("experiments/block_diffusion/results/head_curves.json")


def curve_of(folder: Path) -> list[dict[str, Any]]:
    """A line for each evaluation of a run: its update, the ratio in all and after each step, and agreement.

    Raises:
      ValueError: a run without an evaluation.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} holds no metrics.jsonl: it is no run of train_head")
    lines = [line for _, line in json_lines(path)]
    found = [
        {"run": folder.name, "step": line["step"]}
        | {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
        for line in lines
        if RATIO in line
    ]
    if not found:
        raise ValueError(f"{path} has no {RATIO}: the run ended before its first evaluation")
    return found


def last_of(folder: Path) -> dict[str, Any] | None:
    """What the finished head was found to be on more text; None of a run that is not done."""
    path = folder / "held_out.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def names_of(options: Options) -> Sequence[str]:
    """The runs.

    Raises:
      ValueError: there are none.
    """
    found = options.names or tuple(
        name for name in RECIPES if (options.runs / name / "metrics.jsonl").exists()
    )
    if not found:
        raise ValueError(
            f"no head was trained in {options.runs}: see python -m experiments.block_diffusion.train_head"
        )
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Writes, draws and prints the curves."""
    names = names_of(options)
    curves = {name: curve_of(options.runs / name) for name in names}
    done = {name: found for name in names if (found := last_of(options.runs / name)) is not None}
    table = [row for rows in curves.values() for row in rows]
    write_record(options.out, options, {"rows": table, "held_out": done})
    points = {
        name: [(row["step"], row["kl_ratio"], [row["kl_ratio"]] * 2) for row in rows]
        for name, rows in curves.items()
    }
    try:
        picture = options.out.parent.parent / "figures" / f"{options.out.stem}.png"
        draw_panels({"divergence over that of no head": points}, picture, x="update", log_x=False)
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')")
    for name, rows in curves.items():
        last = rows[-1]
        held = f"; on held-out text {done[name]['kl_ratio']:.3f}" if name in done else ""
        print(f"{name}: {last['kl_ratio']:.3f} of no head after {last['step']} updates{held}")


if __name__ == "__main__":
    run_command(main)
