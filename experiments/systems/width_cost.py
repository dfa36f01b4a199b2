"""What a step costs against the positions in it: `python -m experiments.systems.width_cost`.

The curve by which waves choose their compiled widths (`COST` in `paradec_jax/decode/recurrent/buckets.py`), measured
on this machine: a network call of r' recurrences over n positions after cached ones, the most probable token of each,
and keys and values written, in a compiled loop, with random weights. All widths take turns; the range of a ratio is a
bootstrap over passes. Printed last are the curve of the quickest passes, which other work on the machine disturbs
least, and the widths that windows would compile by it, beside those by the curve that is there.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from paradec_jax import facts
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.decode.recurrent.buckets import COST, widths_by
from paradec_jax.evaluate.intervals import ends, quicker, times
from paradec_jax.families import init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.report.calls import Loop
from paradec_jax.report.timing import lengthened, turns, warm


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      shape: a recurrent preset.
      recurrence: r', recurrences of a step.
      context: cached positions before the window.
      widths: positions of a step, ascending from 1.
      windows: of waves whose compiled widths are told.
      steps: of a timed loop, at least; narrow ones are longer, so that a timing takes a twentieth of a second.
      passes: timings of each width.
      seed: of weights and tokens.
      out: where the JSON goes; a CSV of the same name lies beside it.
    """

    shape: str = "tiny-recurrent"
    recurrence: int = 4
    context: int = 256
    widths: tuple[int, ...] = tuple(COST)
    windows: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    steps: int = 10
    passes: int = 15
    seed: int = 0
    out: Path = Path("experiments/systems/results/width_cost.json")

    def __post_init__(self) -> None:
        if self.shape not in RECURRENT_PRESETS:
            raise ValueError(f"shape must be one of {', '.join(RECURRENT_PRESETS)}, not {self.shape!r}")
        for name, least in (("recurrence", 1), ("context", 1), ("steps", 1), ("passes", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.widths[:1] != (1,) or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must ascend from 1, not {self.widths}")
        if min(self.windows, default=1) < 1:
            raise ValueError(f"windows must be at least 1, not {self.windows}")
        room = RECURRENT_PRESETS[self.shape].max_length
        if self.context + self.widths[-1] > room:
            raise ValueError(
                f"context and the widest window are more than the {room} positions of {self.shape}"
            )


def measure(options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """One row a width, and the dtypes of the parameters."""
    config = RECURRENT_PRESETS[options.shape]
    network = RecurrentDepthNetwork(config).at(options.recurrence)
    params = network.prepare(init_params(config, jax.random.key(options.seed)))
    loops = {
        f"{width}": Loop(network, params, width, options.context, options.steps).compile()
        for width in options.widths
    }
    for loop in loops.values():
        _, loop.steps = lengthened(warm(loop), loop.steps)
    seconds = turns(loops, options.passes)
    passes = {width: [x / loops[f"{width}"].steps for x in seconds[f"{width}"]] for width in options.widths}
    rows = []
    for width, mine in passes.items():
        over, interval = quicker(passes[1], mine)
        row: dict[str, Any] = {"width": width, "milliseconds": 1e3 * statistics.median(mine)}
        row |= {"quickest": 1e3 * min(mine), "slowest": 1e3 * max(mine), "steps": loops[f"{width}"].steps}
        row |= {"over_one_position": over, "over_one_position_interval": ends(interval), "passes": mine}
        rows.append(row)
    return rows, facts.dtypes(params)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the curve, and the widths that follow from it."""
    rows, dtypes = measure(options)
    for row in rows:
        over = times(row["over_one_position"], row["over_one_position_interval"])
        print(
            f"{row['width']:4d} positions: {row['milliseconds']:7.3f} ms ({row['quickest']:.3f} to "
            f"{row['slowest']:.3f}), {over} of one position"
        )
    curve = {row["width"]: float(f"{row['quickest']:.2g}") for row in rows}
    widths = [
        {"window": window, "by_this_curve": widths_by(curve, window), "by_cost": widths_by(COST, window)}
        for window in options.windows
    ]
    write_record(
        options.out, options, {"rows": rows, "curve": curve, "widths": widths}, dtypes=dtypes, lines=rows
    )
    print(f"COST = {curve}")
    for one in widths:
        changed = "as now" if one["by_this_curve"] == one["by_cost"] else f"now {one['by_cost']}"
        print(f"a window of {one['window']} would compile {one['by_this_curve']}, {changed}")
    print(f"written: {options.out}")


if __name__ == "__main__":
    run(main)
