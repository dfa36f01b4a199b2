"""What one device does with this library, in a few minutes: `python -m experiments.systems.report`.

    python -m experiments.systems.report --minutes 8 --parts device calls --out report

Parts, the important ones first: `device`, how fast it reads a large array and multiplies two large
matrices; `calls`, what a network call over 2 to 256 positions costs beside one over a single
position; `autoregressive`, how close such decoding comes to the read rate; `bundled`, speed of the
bundled models; `training`, a step's share of the products.

The folder holds `report.json` and `report.md`, written anew after every group of timings: a killed
run leaves what it has. Settings that are compared take turns in every pass. A ratio is that of
medians, with a 95% range by bootstrap over passes. Processor time is that of all threads of this
process. Weights are random: a CPU times one layer of each part of a model (two of a plain
transformer) with the output product, in float32; an accelerator times whole models in bfloat16.
Programs are compiled in parallel before the timings of their group. What found no time is listed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from experiments.common.ratios import quicker, times
from experiments.common.record import write_record
from experiments.systems.machine import in_words, memory_left
from experiments.tasks import word_problems
from paradec_jax import facts, load, losses
from paradec_jax.config import CAUSAL_PRESETS, ModelConfig, RecurrentDepthConfig
from paradec_jax.decode import (
    AutoRegressive,
    BlockDenoising,
    Jacobi,
    Masked,
    Static,
    make_request,
    run,
)
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.evaluate.cases import Prompts, case_of, prompts_of
from paradec_jax.evaluate.intervals import ends
from paradec_jax.families import PRESETS, network_of, parameter_shapes
from paradec_jax.io import atomic_write_text
from paradec_jax.models import update_flops
from paradec_jax.train import TrainState, make_train_step

SHARES = {
    "device": 8,
    "calls": 42,
    "autoregressive": 14,
    "bundled": 24,
    "training": 12,
}  # of the minutes
WINDOWS = ((1, 8, 32), (2, 4, 16), (64, 128, 256))  # positions of a call, the important ones first
CALLS = ("qwen3-0.6b", "smollm2-135m", "sdar-1.7b", "huginn-0125", "mdlm-small")
ONE_BY_ONE = ("qwen3-0.6b", "smollm2-135m", "huginn-0125")
CONTEXT, TOKENS = 256, 32  # cached positions before a call; tokens that decoding one by one writes
RECURRENCE = 4  # of a call of a recurrent model
PASSES, SEED = 5, 1
LONG = 0.2  # seconds that a timed loop should take
shapes_of = functools.lru_cache(parameter_shapes)  # tracing a whole network takes seconds
GRACE = 15.0  # seconds after the minutes, when a compilation that still runs is given up
MOST_COPIES = (
    2.5  # of a model's weights in memory at once: as drawn, as prepared, and what a program needs
)
STATES = 8  # the same in a training step: gradients, moments, updates, new values, and logits
LEGEND = "A time is the median of the passes. 1.50x means 1.5 times as fast as the setting named after it."
COLUMNS = (
    "part",
    "what",
    "setting",
    "time [quickest, slowest]",
    "processor time",
    "figure",
    "against [95%]",
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each pass, by the clock and of all threads of the process."""

    wall: tuple[float, ...]
    busy: tuple[float, ...]

    def each(self, count: float, less: "Timing | None" = None) -> "Timing":
        """Seconds of one of `count` equal parts, of what this takes longer than another where one
        is given.
        """
        other = Timing((0.0,) * len(self.wall), (0.0,) * len(self.busy)) if less is None else less
        wall, busy = (
            zip(self.wall, other.wall, strict=True),
            zip(self.busy, other.busy, strict=True),
        )
        return Timing(
            *(tuple(max(a - b, 1e-9) / count for a, b in pairs) for pairs in (wall, busy))
        )

    @property
    def seconds(self) -> float:
        """Median by the clock."""
        return statistics.median(self.wall)


class Clock:
    """The time that is left for a part."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(self.end - time.monotonic(), 0.0)


def in_turns(
    calls: Mapping[Any, Callable[[], Any]], clock: Clock, passes: int = PASSES
) -> dict[Any, Timing]:
    """Times calls that were warmed up, each in its turn in every pass: two passes, and more while
    time is left.
    """
    found: dict[Any, list[tuple[float, float]]] = {name: [] for name in calls}
    for done in range(passes):
        if done >= 2 and not clock.left():
            break
        for name, call in calls.items():
            wall, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            found[name].append((time.perf_counter() - wall, time.process_time() - busy))
    return {name: Timing(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def compiled(
    jobs: Mapping[str, Callable[[], Any]], clock: Clock
) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs jobs that compile, several at once; what came out in time, and why the others did not."""
    pool = concurrent.futures.ThreadPoolExecutor(facts.device()["threads"])
    futures = {name: pool.submit(job) for name, job in jobs.items()}
    concurrent.futures.wait(futures.values(), timeout=min(clock.left(), threading.TIMEOUT_MAX))
    pool.shutdown(wait=False, cancel_futures=True)
    done, left = {}, {}
    for name, future in futures.items():
        if future.cancelled() or not future.done():
            left[name] = "not compiled in time"
        elif (error := future.exception()) is not None:
            left[name] = " ".join(str(error).split())[:200] or type(error).__name__
        else:
            done[name] = future.result()
    return done, left


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

        The ratio is that to `base`: a name, its timing, and the work done here and there.
        """
        row: dict[str, Any] = dict(zip(("part", "what", "setting"), place, strict=True))
        row |= {
            "seconds": timing.seconds,
            "passes": list(timing.wall),
            "processor": list(timing.busy),
        }
        if base is not None:
            ratio, interval = quicker(timing.wall, base[1].wall, *base[2:])
            row |= {"against": base[0], "speedup": ratio, "speedup_interval": ends(interval)}
        self.rows.append(row | {"figure": figure, **more})

    def leave(self, part: str, what: str, why: str) -> None:
        """Notes what was not measured."""
        self.left_out.append({"part": part, "what": what, "why": why})

    def write(self) -> None:
        """Writes both files."""
        results = {"rows": self.rows, "left_out": self.left_out}
        write_record(self.out / "report.json", self.options, results)
        cells = [COLUMNS, ("---",) * len(COLUMNS), *map(cells_of, self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        left = "".join(f"\n- {one['part']}, {one['what']}: {one['why']}" for one in self.left_out)
        text = f"# What this device does\n\n{in_words(facts.facts())}. {LEGEND}\n\n{table}\n"
        atomic_write_text(
            self.out / "report.md", text + (f"\nNot measured:\n{left}\n" if left else "")
        )


def cells_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table."""
    took = f"{duration(row['seconds'])} [{duration(min(row['passes']))}, {duration(max(row['passes']))}]"
    ratio = (
        "against" in row and f"{times(row['speedup'], row['speedup_interval'])} {row['against']}"
    )
    busy = duration(statistics.median(row["processor"]))
    return row["part"], row["what"], row["setting"], took, busy, row["figure"], ratio or ""


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    unit, scale = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("us", 1e6)
    )
    return f"{seconds * scale:.3g} {unit}"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second of each way to read a large array, operations a second of products, and the
    timings of both.
    """

    ways: dict[str, float]
    flops: float
    timings: dict[str, Timing]

    @property
    def read(self) -> float:
        """Bytes a second of the quickest way."""
        return max(self.ways.values())


def reading_ways(dtype: str, side: int, repeats: int) -> dict[str, Callable[[], Any]]:
    """Programs that read a square matrix `repeats` times. Each reading depends on the one before
    it.
    """
    matrix = jnp.full((side, side), 1 / side, dtype)

    def sums(matrix: Array) -> Array:
        def body(_: Array, carry: Array) -> Array:
            return jnp.max(jnp.sum(matrix + carry.astype(dtype), axis=1, dtype=jnp.float32)) * 1e-20

        return lax.fori_loop(0, repeats, body, jnp.float32(0))

    def products(matrix: Array, rows: Array, axis: int) -> Array:
        def body(_: Array, rows: Array) -> Array:
            found = jnp.tensordot(rows, matrix, (1, axis), preferred_element_type=jnp.float32)
            return (found * 1e-3 + 1).astype(rows.dtype)

        return lax.fori_loop(0, repeats, body, rows)

    found: dict[str, Callable[[], Any]] = {"sum": functools.partial(jax.jit(sums), matrix)}
    for count in (1, 8):
        for axis in (0, 1):
            program = jax.jit(functools.partial(products, axis=axis))
            name = f"product with {count} row{'s' * (count > 1)}" + ", transposed" * axis
            found[name] = functools.partial(program, matrix, jnp.ones((count, side), dtype))
    return found


@functools.lru_cache
def rates(dtype: str) -> Rates:
    """Measures the default device, once in a process.

    Ways to read: a sum of an array in `dtype`, products of one and of eight rows with a matrix, and
    a copy, of which bytes read and written count.
    """
    cpu = jax.default_backend() == "cpu"
    size = jnp.dtype(dtype).itemsize
    side, repeats = math.isqrt((2**28 if cpu else 2**30) // size), 2 if cpu else 16
    calls = reading_ways(dtype, side, repeats)
    moved = dict.fromkeys(calls, repeats * size * side**2)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = [copy(jnp.zeros(side**2, dtype))]

    def copies() -> Any:
        for _ in range(repeats):
            buffer[0] = copy(buffer[0])
        return buffer[0]

    calls["copy"], moved["copy"] = copies, 2 * moved["sum"]
    edge = 2048 if cpu else 8192
    square = jnp.ones((edge, edge), dtype)
    product = jax.jit(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32))
    calls["square product"] = functools.partial(product, square, square)
    for call in calls.values():
        jax.block_until_ready(call())
    timings = in_turns(calls, Clock())
    ways = {name: moved[name] / min(timings[name].wall) for name in moved}
    return Rates(ways, 2 * edge**3 / min(timings["square product"].wall), timings)


def device(report: Report, clock: Clock) -> None:
    """A row a way to read, and one of products."""
    found = rates(dtype_here())
    for name, timing in found.timings.items():
        rate = found.ways.get(name, found.flops)
        figure = f"{rate / 1e9:,.0f} {'GB/s' if name in found.ways else 'GFLOP/s'}"
        figure += ", the read rate" if rate == found.read else ""
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any, seed: Array) -> Array:
    """Numbers between -0.02 and 0.02 by a cheap hash: a large model is filled in seconds."""
    bits = (lax.iota(jnp.uint32, math.prod(shape)) + seed) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    return ((bits >> 16).astype(jnp.float32) / 2**16 - 0.5).reshape(shape).astype(dtype) * 0.04


def random_params(config: ModelConfig) -> Any:
    """Raw random parameters."""
    leaves, treedef = jax.tree.flatten(shapes_of(config))
    drawn = [
        _random(leaf.shape, leaf.dtype, jnp.uint32(97 * i + 1)) for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, drawn)


def can_begin(
    report: Report, clock: Clock, part: str, what: str, config: ModelConfig, copies: float
) -> bool:
    """Whether there is time, and memory for so many copies of the weights; notes what is missing."""
    left = memory_left()
    size = copies * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes_of(config)))
    if not clock.left():
        report.leave(part, what, "no time was left")
    elif left is not None and size > left:
        report.leave(part, what, f"needs {size / 2**30:.1f} GiB, and {left / 2**30:.1f} are free")
    else:
        return True
    return False


def network_at(config: ModelConfig) -> Any:
    """The network; a recurrent one at the depth that is timed."""
    network = network_of(config)
    return network.at(RECURRENCE) if "recurrences" in network.counters else network


def run_calls(network: Any, params: Any, cache: Any, tokens: Array, at: Array, steps: Any) -> Any:
    """`steps` calls at one place: forward pass, most probable tokens, keys and values written to
    the cache.

    Each call reads the tokens that the one before it predicted. A network that sees its whole
    canvas has no cache.
    """
    positions = at[:, None] + jnp.arange(tokens.shape[1])

    def step(_: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        cache, tokens = carry
        prefix = None if cache is None else Prefix(cache, at)
        out = network.forward(params, tokens, positions, prefix)
        found = jnp.argmax(network.logits(params, out.hidden), axis=-1).astype(jnp.int32)
        return (
            cache if cache is None else network.write(cache, out.kv, write_after_read(at, found))
        ), found

    return lax.fori_loop(0, steps, step, (cache, tokens))


@dataclasses.dataclass(eq=False)
class CallLoop:
    """A compiled loop of calls, the buffers that it hands on, and how many calls it makes."""

    program: Any
    params: Any
    buffers: Any
    at: Array
    steps: int = 1

    def __call__(self) -> Any:
        """Runs the loop."""
        self.buffers = self.program(self.params, *self.buffers, self.at, np.int32(self.steps))
        return self.buffers


_PROGRAMS: dict[Any, Any] = {}


def call_loop(config: ModelConfig, params: Any, positions: int, context: int) -> CallLoop:
    """The loop of calls over so many positions; its program is compiled once in a process."""
    network = network_at(config)
    context = 0 if network.visibility == "full" else context
    draw = (
        np.random.default_rng(SEED)
        .integers(0, config.vocab_size - 1, (1, positions))
        .astype(np.int32)
    )
    cache = None
    if network.visibility != "full":
        cache = network.init_cache(jax.random.split(jax.random.key(SEED), 1), context + positions)
    buffers, at = (cache, jnp.asarray(draw)), jnp.full(1, context, jnp.int32)
    key = (config, positions, context)
    if key not in _PROGRAMS:
        loop = jax.jit(functools.partial(run_calls, network), donate_argnums=(1, 2))
        _PROGRAMS[key] = loop.lower(params, *buffers, at, np.int32(1)).compile()
    return CallLoop(_PROGRAMS[key], params, buffers, at)


def call_cost(
    config: ModelConfig,
    positions: Sequence[int],
    context: int = CONTEXT,
    clock: Clock | None = None,
) -> tuple[dict[int, Timing], dict[str, str]]:
    """Seconds of a network call over several numbers of positions, timed in turns at batch 1 with
    random weights.

    A network without a cache has no context. Returns timings of one call by the number of
    positions, and the reasons for those that are missing because the clock ran out.
    """
    clock, params = clock or Clock(), network_of(config).prepare(random_params(config))
    jobs = {str(n): functools.partial(call_loop, config, params, n, context) for n in positions}
    loops, left = compiled(jobs, clock)
    for _ in range(2):  # warms up, then foretells how many calls a timing needs
        for name, timing in in_turns(loops, clock, 1).items():
            loops[name].steps = min(max(math.ceil(LONG / timing.seconds), 1), 512)
    found = in_turns(loops, clock)
    return {int(name): timing.each(loops[name].steps) for name, timing in found.items()}, left


def calls(report: Report, clock: Clock) -> None:
    """Rows of every shape: all shapes at the first windows, then at the next ones."""
    for group in WINDOWS:
        for preset in CALLS:
            config, name = shape_here(preset)
            what = f"{name}, {', '.join(map(str, group))} positions"
            if can_begin(report, clock, "calls", what, config, MOST_COPIES):
                measure_calls(report, clock, config, name, group)
                report.write()


def measure_calls(
    report: Report, clock: Clock, config: ModelConfig, name: str, group: Sequence[int]
) -> None:
    """A row for each number of positions of a group, beside a call over one position."""
    network = network_at(config)
    context = 0 if network.visibility == "full" else CONTEXT
    found, left = call_cost(config, list(dict.fromkeys((1, *group))), context, clock=clock)
    for missing, why in left.items():
        report.leave("calls", f"{name}, {missing} positions", why)
    limits, depth = rates(config.dtype), getattr(network, "recurrence", None)
    for positions in [n for n in group if n in found]:
        timing, work, base = found[positions], network.work(1, positions, context), None
        reads, products = (
            n / timing.seconds for n in (work.bytes / limits.read, work.flops / limits.flops)
        )
        share, limit = max((reads, "reads"), (products, "products"))
        more: dict[str, Any] = {
            "positions": positions,
            "context": context,
            "share": share,
            "limit": limit,
        }
        figure = f"{100 * share:.0f}% of {limit}"
        if positions > 1 and 1 in found:
            # As many calls over one position: the tokens that a call must commit to gain.
            needed, interval = quicker(found[1].wall, timing.wall)
            more |= {"needed": needed, "needed_interval": ends(interval)}
            figure, base = (
                f"{figure}, costs {needed:.2f} calls",
                ("a call over 1 position", found[1]),
            )
        setting = f"{positions} positions" + ("" if depth is None else f", {depth} recurrences")
        report.add(
            ("calls", name, setting if context else f"canvas of {positions}"),
            timing,
            figure,
            base,
            **more,
        )


def autoregressive(report: Report, clock: Clock) -> None:
    """A row a shape: seconds of a token, prompt left out, and the share of the read rate."""
    for preset in ONE_BY_ONE:
        config, name = shape_here(preset)
        if can_begin(report, clock, "autoregressive", name, config, MOST_COPIES):
            measure_tokens(report, clock, config, name)
            report.write()


def measure_tokens(report: Report, clock: Clock, config: ModelConfig, name: str) -> None:
    """One row; one program reads the prompt, and decodes unless it is told to take no step."""
    network = network_at(config)
    params, depth = network.prepare(random_params(config)), getattr(network, "recurrence", None)
    decoder: Any = (
        AutoRegressive(greedy=True) if depth is None else Static(recurrence=depth, greedy=True)
    )
    prompt = np.random.default_rng(SEED).integers(0, config.vocab_size - 1, (1, CONTEXT))
    request = make_request(prompt, max_new_tokens=TOKENS, seed=SEED)
    whole = functools.partial(run, decoder.bind(network, CONTEXT + TOKENS), params, request)
    reading = functools.partial(whole, max_steps=0)
    _, left = compiled({name: lambda: jax.block_until_ready(reading())}, clock)
    if left:
        return report.leave("autoregressive", name, left[name])
    both = in_turns({"whole": whole, "reading": reading}, clock)
    token = both["whole"].each(TOKENS - 1, both["reading"])
    moved = network.work(1, 1, CONTEXT + TOKENS // 2).bytes
    share = moved / rates(config.dtype).read / token.seconds
    figure = f"{1 / token.seconds:,.1f} tokens/s, {100 * share:.0f}% of the read rate"
    setting = "a token" + ("" if depth is None else f", {depth} recurrences")
    report.add(("autoregressive", name, setting), token, figure, share=share, bytes=moved)


PAIRS = {  # settings of each model; the first one is the baseline
    "tiny-jacobi": (
        Setting("one by one", AutoRegressive()),
        Setting("Jacobi, running window of 16", Jacobi(block=16, running=True)),
    ),
    "tiny-recurrent-distilled": (
        Setting("one by one, 1 recurrence", Static(recurrence=1)),
        Setting("Jacobi, running window of 8", Jacobi(block=8, running=True, recurrence=1)),
    ),
    "tiny-sdar": (
        Setting("one position a call", BlockDenoising(rule="static")),
        Setting("factor rule", BlockDenoising(rule="factor")),
    ),
    "tiny-mdlm-distilled": tuple(
        Setting(f"{steps} steps", Masked(), Masked.Knobs(steps=steps)) for steps in (64, 16)
    ),
}


def prompts_here(model: Any, count: int) -> Prompts:
    """Prompts of unseen word problems; of a model that writes texts, nothing to begin with."""
    if model.family == "masked_diffusion":
        nothing = np.zeros((count, 0), np.int32), np.zeros(count, np.int32)
        return Prompts(
            *nothing, jax.random.split(jax.random.key(SEED), count), 64, model.token_spec.stop
        )
    texts = [problem.prompt for problem in word_problems(count, seed=SEED, steps=(2, 4))]
    return prompts_of(model, texts, SEED, 96)


def bundled(report: Report, clock: Clock, batches: Sequence[int] = (1, 8, 64)) -> None:
    """Rows of every bundled model at every batch, all models at the smallest batch first."""
    models = {name: load(name) for name in PAIRS}
    for batch in batches:
        for name, model in models.items():
            if can_begin(
                report, clock, "bundled", f"{name}, batch {batch}", model.config, 2 * MOST_COPIES
            ):
                measure_model(report, clock, f"{name}, batch {batch}", model, PAIRS[name], batch)
                report.write()


def measure_model(
    report: Report, clock: Clock, name: str, model: Any, settings: Sequence[Setting], batch: int
) -> None:
    """One row a setting at one batch size; at batch 1 four prompts, one after the other."""
    params, count = model.network.prepare(model.params), max(batch, 4)
    prompts = prompts_here(model, count)
    requests = [prompts.request(range(start, start + batch)) for start in range(0, count, batch)]

    def decode(setting: Setting) -> list[Any]:
        case = case_of(setting, model, prompts.size, params)
        return jax.block_until_ready(
            [run(case.decoder, params, one, case.knobs) for one in requests]
        )

    jobs = {setting.name: functools.partial(decode, setting) for setting in settings}
    done, left = compiled(jobs, clock)
    for setting, why in left.items():
        report.leave("bundled", f"{name}, {setting}", why)
    timings, first = in_turns({setting: jobs[setting] for setting in done}, clock), settings[0].name
    tokens = {
        setting: sum(int(np.sum(one.generated)) for one in found) for setting, found in done.items()
    }
    for setting, timing in timings.items():
        base = None
        if setting != first and first in timings:
            base = (first, timings[first], tokens[setting], tokens[first])
        made = sum(int(np.sum(found.network_calls)) for found in done[setting])
        speed = tokens[setting] / timing.seconds
        figure = f"{speed:,.0f} tokens/s, {tokens[setting] / made:.2f} tokens a call"
        more = {
            "tokens": tokens[setting],
            "network_calls": made,
            "tokens_per_second": speed,
            "batch": batch,
        }
        report.add(("bundled", name, setting), timing, figure, base, **more)


def training(report: Report, clock: Clock) -> None:
    """One row: a step of Adam, float32 parameters, products in the dtype of this device."""
    cpu = jax.default_backend() == "cpu"
    name, batch, length = ("tiny-causal", 16, 256) if cpu else ("smollm2-135m", 16, 1024)
    types: dict[str, Any] = {"dtype": dtype_here(), "param_dtype": "float32"}
    config = dataclasses.replace(CAUSAL_PRESETS[name], **types, scan_layers=not cpu)
    what, network = f"{name}, {batch} x {length}", network_of(config)
    if not can_begin(report, clock, "training", what, config, STATES):
        return
    optimizer = optax.adam(1e-4)
    state = TrainState.create(random_params(config), optimizer, jax.random.key(SEED))
    update = make_train_step(losses.next_token_loss(network), optimizer)
    tokens = (
        np.random.default_rng(SEED)
        .integers(0, config.vocab_size, (batch, length + 1))
        .astype(np.int32)
    )
    weights = np.ones((batch, length), np.float32)
    given = jax.device_put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})

    def step() -> Any:
        nonlocal state
        state, metrics = update(state, given)
        return metrics

    _, left = compiled({what: lambda: jax.block_until_ready([step(), step()])}, clock)
    if left:
        return report.leave("training", what, left[what])
    timing = in_turns({what: step}, clock)[what]
    flops, rate = update_flops(network, batch, length), rates(config.dtype).flops
    share = flops / timing.seconds / rate
    figure = f"{100 * share:.0f}% model FLOP utilisation, {batch * length / timing.seconds:,.0f} positions/s"
    report.add(
        ("training", what, f"a step, {config.dtype}"), timing, figure, share=share, flops=flops
    )


PARTS: dict[str, Callable[[Report, Clock], None]] = {
    part.__name__: part for part in (device, calls, autoregressive, bundled, training)
}


def measure(out: Path, minutes: float = 8.0, parts: Sequence[str] = tuple(PARTS)) -> Report:
    """Measures the parts in their order; each gets its share of the minutes, and leaves the rest to
    the next ones.
    """
    if not minutes > 0 or not parts or set(parts) - set(PARTS):
        known = ", ".join(PARTS)
        raise ValueError(
            f"minutes must be above 0 and parts among {known}, not {minutes} and {parts}"
        )
    whole = Clock(60 * minutes)
    report = Report(out, {"minutes": minutes, "parts": list(parts), "seed": SEED})
    chosen = [name for name in PARTS if name in parts]
    for i, name in enumerate(chosen):
        share = SHARES[name] / sum(SHARES[other] for other in chosen[i:])
        begun = len(report.rows)
        try:
            PARTS[name](report, Clock(share * whole.left()))
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # a device that refuses, such as one without memory
            report.leave(name, "the rest of the part", " ".join(str(error).split())[:200])
        report.write()
        print("\n".join(" | ".join(cells_of(row)) for row in report.rows[begun:]), flush=True)
    for one in report.left_out:
        print(f"not measured: {one['part']}, {one['what']}: {one['why']}", flush=True)
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time of the whole report (default 8)"
    )
    parser.add_argument(
        "--parts", nargs="+", default=list(PARTS), help=f"some of: {', '.join(PARTS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder (default report)")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    late = threading.Timer(max(60 * options.minutes, 0) + GRACE, leave, ("the time is up",))
    late.daemon = True
    late.start()
    try:
        measure(options.out, options.minutes, options.parts)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    leave(f"written: {options.out / 'report.md'}")


def leave(message: str) -> None:
    """Ends the process at once: a compilation that nobody waits for would keep it alive."""
    print(message, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
