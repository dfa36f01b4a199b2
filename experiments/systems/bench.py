"""Cost curves of decoding with random weights. `python -m experiments.systems.bench`.

Two shapes, one whose weights fit into the cache of a processor and one whose weights do not. From a common
point, one of three things is varied at a time: the tokens before a step's window, the width of the wave, the
rows of a batch. Three decoders stand side by side, each as it is paced whatever the weights say:

| decoder  | recurrences a token           | tokens a step                                      |
|----------|-------------------------------|----------------------------------------------------|
| static   | W r'                          | 1                                                  |
| released | (W - 1) r', rule "fixed"      | 1, once the wave is W - 1 positions wide           |
| clean    | W r', by its `max_recurrence` | 1, once the wave is W positions wide               |

How close a step comes to the limit of the device is the larger of two shares: of the bytes a second that were
read when a matrix as large as the model (for what recurrences read again, as the core) was multiplied with a
vector, and of the operations a second that a product of two large matrices did. What a copy moves stands
beside them. Before that every knob of each decoder is turned, which must compile nothing.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.common.record import write_record
from experiments.replicas import ReleasedWavefront
from paradec_jax import RecurrentDepthConfig, Static, Wavefront, facts, make_request
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.decode.machine import drive
from paradec_jax.families import init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.timing.bench import bench, limits_of

LARGE = RecurrentDepthConfig(
    vocab_size=384, width=1024, heads=16, feed_forward=2816, prelude_layers=1, core_layers=4, coda_layers=1
)
COLOURS = {"static": "#0072B2", "released": "#E69F00", "clean": "#009E73"}
AXES = {"context": "context [tokens]", "width": "width of the wave W", "batch": "rows"}
TURNED = {  # a value of every knob that is not its default
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "init_scale": 0.5,
    "exit_threshold": 0.2,
    "momentum": 0.3,
    "noise": 0.25,
    "max_wavefront": 3,
    "max_recurrence": 2,
    "max_steps": 5,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      shapes: which of the two shapes.
      decoders: which of the three decoders.
      contexts, widths, batches: the points of each curve.
      context, width, batch: the point that the curves share.
      inner_recurrence: r', recurrences of a wave's step.
      tokens: tokens to generate in each row.
      passes: timings of each point, of which the median counts.
      seed: of weights and prompts.
      large: shape of the second model; its length is raised to what the longest context needs.
      out: where the JSON goes; a CSV of the same name lies beside it.
      figure: where the plot goes.
    """

    shapes: tuple[Literal["tiny", "large"], ...] = ("tiny", "large")
    decoders: tuple[Literal["static", "released", "clean"], ...] = ("static", "released", "clean")
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: int = 256
    width: int = 8
    batch: int = 1
    inner_recurrence: int = 1
    tokens: int = 32
    passes: int = 3
    seed: int = 0
    large: RecurrentDepthConfig = LARGE
    out: Path = Path("experiments/systems/results/bench.json")
    figure: Path = Path("experiments/systems/figures/bench.png")


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a curve."""

    decoder: str
    context: int
    width: int
    batch: int


def paced(name: str, width: int, inner: int) -> tuple[Any, Any] | None:
    """A decoder and its knobs, or None for a wave too narrow for the released rule.

    The clean wave never calls a state converged by its distance, but always after W r' recurrences: a position
    does r' of them in each of the W steps from the newest slot to the oldest.
    """
    if name == "static":
        return Static(recurrence=width * inner, greedy=True), None
    if name == "released":
        return None if width < 4 else (released_pace((width - 3) * inner, inner), None)
    decoder = Wavefront(inner_recurrence=inner, window=width, prefill_recurrence=1, greedy=True)
    return decoder, Wavefront.Knobs(exit_threshold=0.0, max_recurrence=width * inner)


def released_pace(recurrence: int, inner_recurrence: int) -> ReleasedWavefront:
    """The released sampler at its own pace, rule "fixed": one token a step, `(r div r' + 2) r'` recurrences each."""
    window = recurrence // inner_recurrence + 3  # the narrowest that the rule takes
    return ReleasedWavefront(
        inner_recurrence=inner_recurrence, window=window, recurrence=recurrence, rule="fixed", greedy=True
    )


def curves(options: Options) -> dict[str, list[Point]]:
    """The points of the curves over each thing that is varied; those over different things share one."""
    shared = {axis: getattr(options, axis) for axis in AXES}
    values = {"context": options.contexts, "width": options.widths, "batch": options.batches}
    found: dict[str, list[Point]] = {}
    for axis in AXES:
        at = [Point(name, **{**shared, axis: x}) for x in values[axis] for name in options.decoders]
        inner = options.inner_recurrence
        found[axis] = [point for point in at if paced(point.decoder, point.width, inner) is not None]
    return found


def configs(options: Options) -> dict[str, RecurrentDepthConfig]:
    """The shapes, long enough for the longest context."""
    longest = max((*options.contexts, options.context)) + options.tokens
    shapes = {"tiny": RECURRENT_PRESETS["tiny-recurrent"], "large": options.large}
    return {
        name: dataclasses.replace(shapes[name], max_length=max(longest, shapes[name].max_length))
        for name in options.shapes
    }


def turn_knobs(network: Any, params: Any, decoder: Any) -> dict[str, Any]:
    """Runs a decoder with its default knobs, then with each of them turned, and counts what that compiles."""
    request = make_request(np.ones((1, 4), np.int32), max_new_tokens=4)
    bound = decoder.bind(network, 8)
    names = [field.name for field in dataclasses.fields(bound.Knobs)]
    drive.run(bound, params, request, max_steps=4)
    compiled: Any = drive.compiled_run
    before = compiled._cache_size()
    for name in names:
        drive.run(bound, params, request, bound.Knobs(**{name: TURNED[name]}), max_steps=4)
    return {
        "decoder": type(decoder).__name__,
        "knobs": names,
        "compiled": compiled._cache_size() - before,
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Cost of a step and nearness to the limit: two rows of panels a shape, a column for each thing varied."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    size = (12, 5 * len(shapes))
    figure, axes = plt.subplots(2 * len(shapes), 3, figsize=size, squeeze=False, layout="constrained")
    for i, shape in enumerate(shapes):
        for column, (axis, title) in enumerate(AXES.items()):
            cost, share = axes[2 * i, column], axes[2 * i + 1, column]
            ticks = sorted({row[axis] for row in rows if row["axis"] == axis})
            for name in dict.fromkeys(row["name"] for row in rows):
                mine = [
                    row for row in rows if (row["shape"], row["axis"], row["name"]) == (shape, axis, name)
                ]
                at = [row[axis] for row in mine]
                style = {"color": COLOURS[name], "marker": "o", "ms": 4}
                cost.plot(at, [row["microseconds_per_step"] for row in mine], label=name, **style)
                share.plot(at, [100 * row["limit_fraction"] for row in mine], **style)
            for panel in (cost, share):
                panel.set_xscale("log", base=2)
                panel.set_xticks(ticks, [str(tick) for tick in ticks])
                panel.grid(alpha=0.3)
            cost.set_yscale("log")
            cost.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            cost.yaxis.set_major_formatter("{x:g}")
            cost.yaxis.set_minor_formatter("")
            share.set_ylim(bottom=0)
            share.set_xlabel(title)
        size = next(row["parameters"] for row in rows if row["shape"] == shape)
        axes[2 * i, 0].set_title(f"{shape}: {size / 1e6:.1f} M parameters", loc="left", fontsize=11)
        axes[2 * i, 0].set_ylabel("microseconds a step")
        axes[2 * i + 1, 0].set_ylabel("of the nearer limit [%]")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(rows: Sequence[dict[str, Any]], turned: Sequence[dict[str, Any]], options: Options) -> None:
    """The JSON, the points as CSV, and the plot."""
    dtypes = [dtype for row in rows for dtype in row["dtypes"]]
    write_record(options.out, options, {"rows": rows, "knobs": turned}, dtypes=dtypes, lines=rows)
    plot(rows, options.figure)


def check(options: Options) -> None:
    """Refuses, before anything is compiled, what cannot be measured."""
    for name in ("contexts", "widths", "batches", "context", "width", "batch", "inner_recurrence", "passes"):
        if np.min(getattr(options, name), initial=1) < 1:
            raise SystemExit(f"{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.tokens < 2:
        raise SystemExit(f"tokens must be at least 2, not {options.tokens}")
    if not (options.shapes and any(curves(options).values())):
        raise SystemExit("there is nothing to measure: name a shape, a decoder, and a point")


def measure(shape: str, config: RecurrentDepthConfig, options: Options) -> list[dict[str, Any]]:
    """One row for each point of each curve; a point that curves share is measured once."""
    found = curves(options)
    distinct = list(dict.fromkeys(point for points in found.values() for point in points))
    network, params = RecurrentDepthNetwork(config), init_params(config, jax.random.key(options.seed))
    device = limits_of(network, params)
    measured: dict[Point, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(shape, total=len(distinct))
        for point in distinct:
            at = f"context {point.context}, width {point.width}, {point.batch} rows"
            progress.update(task, description=f"{shape}: {point.decoder}, {at}")
            chosen = paced(point.decoder, point.width, options.inner_recurrence)
            assert chosen is not None
            measured[point] = {"name": point.decoder, "width": point.width} | bench(
                network,
                params,
                *chosen,
                batch=point.batch,
                context=point.context,
                tokens=options.tokens,
                passes=options.passes,
                seed=options.seed,
                device=device,
            )
            progress.update(task, advance=1)
    of_shape = {"shape": shape, "dtypes": facts.dtypes(params)}
    return [of_shape | {"axis": axis} | measured[point] for axis, points in found.items() for point in points]


def main(options: Annotated[Options, tyro.conf.arg(name="")]) -> None:
    """Prints and writes the table; fails if turning a knob has compiled anything."""
    check(options)
    config = RECURRENT_PRESETS["test-recurrent"]
    network, params = RecurrentDepthNetwork(config), init_params(config, jax.random.key(options.seed))
    turnable = {
        "static": Static(),
        "released": ReleasedWavefront(window=4),
        "clean": Wavefront(window=4),
    }
    turned = [turn_knobs(network, params, turnable[name]) for name in options.decoders]
    for item in turned:
        print(f"{item['decoder']}: {len(item['knobs'])} knobs turned, {item['compiled']} programs compiled")
    rows: list[dict[str, Any]] = []
    for shape, config in configs(options).items():
        rows += measure(shape, config, options)
    for row in rows:
        print(
            f"{row['shape']:5s} {row['axis']:7s} {row[row['axis']]:5d}  {row['name']:8s}  "
            f"{row['microseconds_per_step']:9.0f} us/step  {row['decode_tokens_per_second']:8.1f} tokens/s  "
            f"{row['step_bytes'] / 1e6:8.1f} MB/step  copy {row['bandwidth_fraction']:4.0%}  "
            f"read {row['read_fraction']:4.0%}  products {row['flops_fraction']:4.0%}  "
            f"compiled in {row['compile_seconds']:5.1f} s"
        )
    write(rows, turned, options)
    if any(item["compiled"] for item in turned):
        raise SystemExit(f"turning a knob compiled a program: see {options.out}")


if __name__ == "__main__":
    tyro.cli(main)
