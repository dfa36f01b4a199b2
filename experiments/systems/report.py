"""What one device does with this library, in a few minutes: `python -m experiments.systems.report`.

    python -m experiments.systems.report --minutes 8 --parts device calls --out report

Parts, the important ones first: `device`, how fast it reads a large array and multiplies two large
matrices; `calls`, how close network calls come to that, and what one over 2 to 256 positions costs
beside one over a single position. `paradec compare` times the bundled models, and the log of a
training says the operations a second of its updates.

The folder holds `report.json` and `report.md`, written anew after every group of timings: a killed
run leaves what it has. Settings that are compared take turns in every pass. A ratio is that of
medians, with a 95% range by bootstrap over passes. Processor time is that of all threads of this
process. Weights are random: a CPU times one layer of each part of a model (two of a plain
transformer) with the output product, in float32; an accelerator times whole models in bfloat16.
Programs are compiled in parallel before the timings of their group. What found no time is listed.
"""

import argparse
import dataclasses
import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.common.ratios import quicker, times
from experiments.common.record import write_record
from experiments.systems.calls import (
    CONTEXT,
    SEED,
    call_cost,
    network_at,
    run_calls,  # noqa: F401  (measuring programs take it from here)
    shapes_of,
)
from experiments.systems.machine import (
    Clock,
    Timing,
    in_words,
    memory_left,
    rates,
)
from paradec_jax import facts
from paradec_jax.config import ModelConfig, RecurrentDepthConfig
from paradec_jax.evaluate.intervals import ends
from paradec_jax.families import PRESETS
from paradec_jax.io import atomic_write_text

WINDOWS = ((1, 8, 32), (2, 4, 16), (64, 128, 256))  # positions of a call, the important ones first
CALLS = ("qwen3-0.6b", "smollm2-135m", "sdar-1.7b", "huginn-0125", "mdlm-small")
GRACE = 15.0  # seconds after the minutes, when a compilation that still runs is given up
# Of a model's weights in memory at once: as drawn, as prepared, and what a program needs.
MOST_COPIES = 2.5
LEGEND = "A time is the median of the passes. 1.50x means 1.5 times as fast as the setting named after it."
COLUMNS = (
    "part | what | setting | time [quickest, slowest] | processor time | figure | against [95%]"
)


class Report:
    """The rows found so far and where they are written."""

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        self.out, self.options = out, options
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []

    def add(
        self,
        place: tuple[str, str, str],
        timing: Timing,
        figure: str,
        base: Any = None,
        **more: Any,
    ) -> None:
        """Adds a row of a part, a thing and its setting.

        The ratio is that to `base`: a name and its timing.
        """
        row: dict[str, Any] = dict(zip(("part", "what", "setting"), place, strict=True))
        row |= {"seconds": timing.seconds, "passes": list(timing.wall)}
        row |= {"processor": list(timing.busy)}
        if base is not None:
            ratio, interval = quicker(timing.wall, base[1].wall)
            row |= {"against": base[0], "speedup": ratio, "speedup_interval": ends(interval)}
        self.rows.append(row | {"figure": figure, **more})

    def leave(self, part: str, what: str, why: str) -> None:
        """Notes what was not measured."""
        self.left_out.append({"part": part, "what": what, "why": why})

    def write(self) -> None:
        """Writes both files."""
        results = {"rows": self.rows, "left_out": self.left_out}
        write_record(self.out / "report.json", self.options, results)
        lines = [COLUMNS, "---|" * 6 + "---", *map(line_of, self.rows)]
        table = "\n".join(f"| {line} |" for line in lines)
        left = "".join(f"\n- {one['part']}, {one['what']}: {one['why']}" for one in self.left_out)
        text = f"# What this device does\n\n{in_words(facts.facts())}. {LEGEND}\n\n{table}\n"
        atomic_write_text(
            self.out / "report.md", text + (f"\nNot measured:\n{left}\n" if left else "")
        )


def line_of(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    took = f"{duration(row['seconds'])} [{duration(min(row['passes']))}, {duration(max(row['passes']))}]"
    ratio, busy = "", duration(statistics.median(row["processor"]))
    if "against" in row:
        ratio = f"{times(row['speedup'], row['speedup_interval'])} {row['against']}"
    return " | ".join([row["part"], row["what"], row["setting"], took, busy, row["figure"], ratio])


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    unit, scale = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("us", 1e6)
    )
    return f"{seconds * scale:.3g} {unit}"


def device(report: Report, clock: Clock) -> None:
    """A row a way to read, and one of products."""
    limits = rates(dtype_here())
    for name, timing in limits.timings.items():
        rate = limits.ways.get(name, limits.flops)
        figure = f"{rate / 1e9:,.0f} {'GB/s' if name in limits.ways else 'GFLOP/s'}"
        figure += ", the read rate" if rate == limits.read else ""
        report.add(("device", "rates", name), timing, figure, rate=rate)


def dtype_here() -> str:
    """The dtype of random weights: on a CPU that of the bundled models. `few_rows` times both types
    there.
    """
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def shape_here(name: str) -> tuple[ModelConfig, str]:
    """A preset as this device times it, and its name in the table."""
    config, dtype = PRESETS[name], dtype_here()
    changes: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype}
    if jax.default_backend() != "cpu":
        return dataclasses.replace(config, **changes), name
    recurrent = isinstance(config, RecurrentDepthConfig)
    parts = ("prelude_layers", "core_layers", "coda_layers")
    changes |= dict.fromkeys(parts, 1) if recurrent else {"layers": 2}
    return dataclasses.replace(config, **changes), f"{name}, {'3' if recurrent else '2'} layers"


def can_begin(report: Report, clock: Clock, part: str, what: str, config: ModelConfig) -> bool:
    """Whether there is time, and memory for the weights; notes what is missing."""
    left = memory_left()
    size = MOST_COPIES * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes_of(config)))
    if not clock.left():
        report.leave(part, what, "no time was left")
    elif left is not None and size > left:
        report.leave(part, what, f"needs {size / 2**30:.1f} GiB, and {left / 2**30:.1f} are free")
    else:
        return True
    return False


def calls(report: Report, clock: Clock) -> None:
    """Rows of every shape: all shapes at the first windows, then at the next ones."""
    for group in WINDOWS:
        for preset in CALLS:
            config, name = shape_here(preset)
            what = f"{name}, {', '.join(map(str, group))} positions"
            if can_begin(report, clock, "calls", what, config):
                measure_calls(report, clock, config, name, group)
                report.write()


def measure_calls(
    report: Report, clock: Clock, config: ModelConfig, name: str, group: Sequence[int]
) -> None:
    """A row for each number of positions of a group, beside a call over one position."""
    network = network_at(config)
    context = 0 if network.visibility == "full" else CONTEXT
    costs, left = call_cost(config, list(dict.fromkeys((1, *group))), context, clock=clock)
    for missing, why in left.items():
        report.leave("calls", f"{name}, {missing} positions", why)
    limits, depth = rates(config.dtype), getattr(network, "recurrence", None)
    for positions in [n for n in group if n in costs]:
        timing, work, base = costs[positions], network.work(1, positions, context), None
        limit_seconds = {"reads": work.bytes / limits.read, "products": work.flops / limits.flops}
        limit = max(limit_seconds, key=lambda name: limit_seconds[name])
        share = limit_seconds[limit] / timing.seconds
        more: dict[str, Any] = {"positions": positions, "context": context}
        more |= {"share": share, "limit": limit}
        figure = f"{100 * share:.0f}% of {limit}"
        if positions > 1 and 1 in costs:
            # As many calls over one position: the tokens that a call must commit to gain.
            needed, interval = quicker(costs[1].wall, timing.wall)
            more |= {"needed": needed, "needed_interval": ends(interval)}
            figure += f", costs {needed:.2f} calls"
            base = "a call over 1 position", costs[1]
        setting = f"{positions} positions" + ("" if depth is None else f", {depth} recurrences")
        place = ("calls", name, setting if context else f"canvas of {positions}")
        report.add(place, timing, figure, base, **more)


PARTS: dict[str, Callable[[Report, Clock], None]] = {"device": device, "calls": calls}


def measure(out: Path, minutes: float = 8.0, parts: Sequence[str] = tuple(PARTS)) -> Report:
    """Measures the parts in their order, each in what is left of the minutes."""
    clock = Clock(60 * minutes)
    report = Report(out, {"minutes": minutes, "parts": list(parts), "seed": SEED})
    for name in [name for name in PARTS if name in parts]:
        begun = len(report.rows)
        try:
            PARTS[name](report, clock)
        except (RuntimeError, MemoryError) as error:  # a device that refuses
            report.leave(name, "the rest of the part", " ".join(str(error).split())[:200])
        report.write()
        print("\n".join(map(line_of, report.rows[begun:])), flush=True)
    for one in report.left_out:
        print(f"not measured: {one['part']}, {one['what']}: {one['why']}", flush=True)
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole report")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder (default report)")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    late = threading.Timer(60 * options.minutes + GRACE, leave, ("the time is up",))
    late.daemon = True
    late.start()
    measure(options.out, options.minutes, options.parts)
    leave(f"written: {options.out / 'report.md'}")


def leave(message: str) -> None:
    """Ends the process at once: a compilation that nobody waits for would keep it alive."""
    print(message, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
