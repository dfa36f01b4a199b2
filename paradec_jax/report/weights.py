"""Random weights of a shape, where time and memory suffice, and decoders that are timed with them."""

import dataclasses
import functools
import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paradec_jax.config import ModelConfig
from paradec_jax.decode import make_request
from paradec_jax.families import PRESETS, init_params, network_of
from paradec_jax.report import kinds
from paradec_jax.report.parts import Task
from paradec_jax.report.sizes import bytes_of, with_dtype
from paradec_jax.report.timing import (
    REPEATS,
    Limits,
    Programs,
    compile_once,
    copies,
    figures,
    limits_for,
    products,
)
from paradec_jax.timing.bench import INSTANT

COPIES = 2.5  # of the weights that there are at once at most: raw, prepared, and what a program needs besides
TOUCHES = 20  # times that making random weights costs what copying them does, and a little more
TRACED = 2  # runs under the profiler
HALF = 0.5  # share of a limit below which the dearest operations are told


def fitting(task: Task) -> list[str]:
    """The presets whose weights fit the memory, among which time is shared; a line for each other one."""
    gc.collect()  # weights of parts before this one
    sizes = {name: bytes_of(with_dtype(PRESETS[name], task.sizes.dtype)) for name in task.sizes.presets}
    return [name for name, size in sizes.items() if task.fits(COPIES * size, name)]


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A network, its prepared random parameters, and the limits of the device for them."""

    name: str
    network: Any
    params: Any
    limits: Limits


def foretold(network: Any, positions: int, context: int) -> float:
    """Seconds that a call takes at least, roughly."""
    least, dtype = network.work(1, positions, context), network.config.dtype
    return max(least.bytes / copies(REPEATS), least.flops / products(dtype, REPEATS))


def load(task: Task, name: str, config: ModelConfig, calls: int, context: int) -> Loaded | None:
    """Random weights of a shape; None, and a line, where they do not fit or so many calls would take too long."""
    gc.collect()  # weights of shapes before this one
    config = with_dtype(config, task.sizes.dtype)
    size, network = bytes_of(config), network_of(config)
    least = TOUCHES * size / copies(REPEATS) + calls * foretold(network, 1, context)
    if not task.fits(COPIES * size, name) or not task.has(least, name):
        return None
    with task.survives(name):
        params = network.prepare(init_params(config, jax.random.key(task.sizes.seed)))
        task.saw(jax.block_until_ready(params))
        return Loaded(name, network, params, limits_for(config.dtype, size, core_bytes(network)))
    return None


def core_bytes(network: Any) -> int:
    """Bytes that a recurrence reads again; 0 where there is none."""
    if "recurrences" not in network.counters:
        return 0
    return network.at(2).work(1, 1, 0).bytes - network.at(1).work(1, 1, 0).bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """A decoder to be timed with random weights: unbound, its knobs, and the network it is for."""

    name: str
    decoder: Any
    knobs: Any = None
    recurrence: int | None = None


def time_decoders(task: Task, loaded: Loaded, named: Sequence[Named]) -> list[dict[str, Any]]:
    """One row of figures a decoder, in turns, with the seconds of a step in each pass.

    The first is the baseline, without which there is nothing; others are left out where time does not suffice.
    """
    sizes = task.sizes
    prompt = np.random.default_rng(sizes.seed).integers(0, loaded.network.vocab_size, (1, sizes.context))
    request = make_request(prompt, max_new_tokens=sizes.tokens, seed=sizes.seed)
    jobs: dict[str, Any] = {}
    for one in named:
        network = loaded.network if one.recurrence is None else loaded.network.at(one.recurrence)
        decoder = one.decoder.bind(network, sizes.context + sizes.tokens)
        decoder.check(request)
        jobs[one.name] = functools.partial(_compiled, one, network, decoder, loaded.params, request)
    timed: list[Timed] = []
    a_pass = 0.0
    for name, ready in task.ready(jobs, loaded.name).items():
        calls = sizes.tokens * foretold(ready.network, 1, sizes.context)
        # Two passes of all that runs, and of this one besides, are still to come.
        if not timed or task.has(3 * calls + 2 * a_pass, name, loaded.name):
            with task.survives(name, of=loaded.name):
                first = ready.programs.time()
                a_pass += first.prompt + first.loop
                timed.append(ready)
    for done in range(1, sizes.passes + 1):
        for ready in timed:
            ready.timings.append(ready.programs.time())
        if done >= 2 and task.left() < a_pass:
            break
    if not timed or timed[0].name != named[0].name:
        task.leave(loaded.name, f"{named[0].name} could not be timed, which the others are compared with")
        return []
    task.passed(len(timed[0].timings), loaded.name)
    return [_row(task, loaded, ready) for ready in timed]


@dataclasses.dataclass(frozen=True, eq=False)
class Timed:
    """A compiled decoder and its timings."""

    name: str
    network: Any
    decoder: Any
    programs: Programs
    timings: list[Any] = dataclasses.field(default_factory=list)


def _compiled(one: Named, network: Any, decoder: Any, params: Any, request: Any) -> Timed:
    return Timed(one.name, network, decoder, compile_once(decoder, params, request, one.knobs))


def _row(task: Task, loaded: Loaded, ready: Timed) -> dict[str, Any]:
    timings, programs = ready.timings, ready.programs
    row: dict[str, Any] = {"shape": loaded.name, "name": ready.name}
    row |= figures(ready.network, ready.decoder, programs, timings, loaded.limits)
    idle = min(timing.idle for timing in timings)
    loops = [max(timing.loop - idle, INSTANT) for timing in timings]
    row["a_step"] = [loop / timing.steps for loop, timing in zip(loops, timings, strict=True)]
    row["a_token"] = [loop / (row["tokens"] - 1) for loop in loops]
    row["costs"] = []
    run = statistics.median(timing.prompt + timing.loop for timing in timings)
    what = f"dearest operations of {ready.name}"
    if row["limit_fraction"] < HALF and task.has(4 * TRACED * run, what, loaded.name):
        unread = ValueError, KeyError, AssertionError  # a trace that cannot be read
        with task.survives(what, *unread, of=loaded.name):
            row["costs"] = kinds.profile(programs, TRACED, statistics.median(row["a_step"]))
            if not row["costs"]:
                task.leave(what, "the profiler tells of none here", loaded.name)
    return row


def costs(row: Mapping[str, Any]) -> str:
    """The dearest kinds of operation of a row in words."""
    return ", ".join(
        f"{100 * cost['share']:.0f}% {cost['kind']} ({cost['operations_per_step']} operations)"
        for cost in row["costs"]
    )
