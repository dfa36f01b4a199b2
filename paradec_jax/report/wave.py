"""Waves on a fixed schedule beside sequential decoding and Jacobi decoding of the same depth, random weights."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from paradec_jax.decode import Jacobi, Static
from paradec_jax.evaluate.intervals import quicker, times
from paradec_jax.report.parts import Part, Result, Table, Task, duration, percent
from paradec_jax.report.sizes import Race
from paradec_jax.report.timing import paced_wavefront
from paradec_jax.report.weights import Named, costs, load, time_decoders


def racers(race: Race) -> list[Named]:
    """Static decoding first, then the waves and Jacobi decoding, each token of which gets r recurrences or more."""
    depth = race.recurrence
    waves = [wave(depth, inner) for inner in race.inner]
    window = Jacobi(block=race.jacobi, running=True, greedy=True)
    static = Named(f"static, r = {depth}", Static(recurrence=depth, greedy=True), None, depth)
    return [static, waves[0], Named(f"Jacobi, r = {depth}", window, None, depth), *waves[1:]]


def wave(depth: int, inner: int) -> Named:
    """A paced wave whose steps compute the whole window from the first on, so that all of them cost alike."""
    decoder, knobs = paced_wavefront(depth, inner)
    return Named(f"wave, r' = {inner}", dataclasses.replace(decoder, buckets=()), knobs)


def measure_race(race: Race, task: Task) -> list[dict[str, Any]]:
    """The rows of one shape, none where it does not fit."""
    loaded = load(task, race.name, race.config, 6 * task.sizes.tokens, task.sizes.context)
    found = [] if loaded is None else time_decoders(task, loaded, racers(race))
    return [judged(row, found[0]) for row in found]


def measure(task: Task) -> Result:
    """Rows of each race."""
    rows: list[dict[str, Any]] = []
    for race, own in task.each(task.sizes.races):
        rows += measure_race(race, own)
    return {"dtype": task.sizes.dtype, "rows": rows}


def judged(row: Mapping[str, Any], static: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its speed over static decoding, and the tokens a step that it must commit to be as fast."""
    value, interval = quicker(row["a_token"], static["a_token"])
    needed, range_of_needed = quicker(static["a_token"], row["a_step"])
    speed = {"speedup": value, "speedup_range": list(interval)}
    return dict(row) | speed | {"needed": needed, "needed_range": list(range_of_needed)}


def tables(result: Result) -> list[Table]:
    """A table a shape."""
    shapes = dict.fromkeys(row["shape"] for row in result["rows"])
    return [_table(shape, [row for row in result["rows"] if row["shape"] == shape]) for shape in shapes]


def _table(shape: str, rows: list[dict[str, Any]]) -> Table:
    lines = [
        [
            row["name"],
            f"{row['decode_tokens_per_second']:.4g}",
            times(row["speedup"], row["speedup_range"]),
            f"{(row['tokens'] - 1) / max(row['network_calls'] - 1, 1):.2f}",
            duration(statistics.median(row["a_step"])),
            times(row["needed"], row["needed_range"]).replace("x", ""),
            percent(row["limit_fraction"]),
            costs(row),
        ]
        for row in rows
    ]
    columns = (
        "decoder",
        "tokens/s",
        "over static [95%]",
        "tokens a step",
        "a step",
        "tokens a step to be as fast",
    )
    return Table(
        f"{shape}, batch 1",
        (*columns, "of the nearer limit", "dearest operations of a step, where below one half"),
        lines,
        f"{len(rows[0]['a_step'])} passes in turns, prompts left out; the range is a bootstrap over passes. A wave "
        "gives every token the recurrences of static decoding and commits one token a step once it is full, whatever "
        f"the weights are; its first steps, in which it grows, are in its speed over {rows[0]['tokens']} tokens, and "
        "compute the whole window too. So what a step costs says what a long text would gain: where less than one "
        "token a step is as fast as static decoding, a full wave is faster. Random weights accept next to nothing, "
        "so of Jacobi decoding that column alone counts.",
    )


def picture(plt: Any, result: Result) -> Any:
    """Milliseconds a step of each decoder with their range, a panel a shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    if not shapes:
        return None
    figure, axes = plt.subplots(
        1, len(shapes), figsize=(5 * len(shapes), 3), squeeze=False, layout="constrained"
    )
    for panel, shape in zip(axes[0], shapes, strict=True):
        rows = [row for row in result["rows"] if row["shape"] == shape]
        names = [row["name"] for row in rows]
        middle = [1e3 * statistics.median(row["a_step"]) for row in rows]
        low, high = ([1e3 * end(row["a_step"]) for row in rows] for end in (min, max))
        errors = [np.subtract(middle, low), np.subtract(high, middle)]
        panel.barh(names, middle, xerr=errors, capsize=2, height=0.6)
        panel.invert_yaxis()
        panel.set_title(shape, fontsize=9)
        panel.set_xlabel("ms a step, quickest to slowest pass")
    return figure


WAVE = Part("wave", "Waves beside sequential decoding of the same depth", 3.0, measure, tables, picture)
