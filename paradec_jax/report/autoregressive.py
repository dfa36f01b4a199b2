"""Autoregressive decoding with random weights, as a share of what the device can read."""

import statistics
from typing import Any

from paradec_jax.decode import AutoRegressive, Static
from paradec_jax.families import PRESETS
from paradec_jax.report.parts import Part, Result, Table, Task, duration, percent
from paradec_jax.report.weights import Loaded, Named, costs, fitting, load, time_decoders


def decoder_of(loaded: Loaded) -> Named:
    """The family's baseline at its own depth."""
    if "recurrences" in loaded.network.counters:
        depth = loaded.network.recurrence
        return Named(f"autoregressive, r = {depth}", Static(recurrence=depth, greedy=True), None, depth)
    return Named("autoregressive", AutoRegressive(greedy=True))


def measure_preset(name: str, task: Task) -> list[dict[str, Any]]:
    """The row of one preset, none where it does not fit."""
    loaded = load(task, name, PRESETS[name], 3 * task.sizes.tokens, task.sizes.context)
    return [] if loaded is None else time_decoders(task, loaded, [decoder_of(loaded)])


def measure(task: Task) -> Result:
    """One row a preset."""
    rows: list[dict[str, Any]] = []
    for name, own in task.each(fitting(task)):
        rows += measure_preset(name, own)
    return {"dtype": task.sizes.dtype, "rows": rows}


def tables(result: Result) -> list[Table]:
    """One line a preset."""
    rows = [
        [
            row["shape"],
            row["name"],
            f"{row['decode_tokens_per_second']:.4g}",
            duration(statistics.median(row["a_step"])),
            f"{len(row['a_step'])}: {duration(min(row['a_step']))} to {duration(max(row['a_step']))}",
            f"{row['step_bytes'] / 1e6:.1f}",
            percent(row["read_fraction"]),
            percent(row["flops_fraction"]),
            f"{row['compile_seconds']:.1f}",
            costs(row),
        ]
        for row in result["rows"]
    ]
    columns = ("shape", "decoder", "tokens/s", "a step", "passes: range", "MB a step", "of the read rate")
    return [
        Table(
            f"One by one, batch 1, random {result['dtype']} weights",
            (
                *columns,
                "of the product rate",
                "compiled in, s",
                "dearest operations of a step, where below one half",
            ),
            rows,
            "Prompts left out; a step writes a token. The read rate is that of matrix-vector products of a matrix as "
            "large as the weights, and for what recurrences read again of one as large as the core. The dearest "
            "operations are told by kind: their share of the time of a step and their number in it, by XLA's "
            "profiler, what tracing costs taken off.",
        )
    ]


AUTOREGRESSIVE = Part("autoregressive", "One by one, as a share of the limit", 2.0, measure, tables)
