"""What a network call costs over 1 to 256 positions, and how many tokens it must commit to gain. Random weights.

A call is the network's forward pass over n new positions after a context, the most probable token of each, and the
new keys and values written to the cache. What a decoder does besides, to judge drafts and to make new ones, is not in
it.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.evaluate.intervals import quicker
from paradec_jax.families import PRESETS
from paradec_jax.report.parts import Part, Result, Table, Task, duration, percent
from paradec_jax.report.sizes import Sizes
from paradec_jax.report.timing import lengthened, read_seconds, turns, warm
from paradec_jax.report.weights import Loaded, fitting, foretold, load

LONG = 0.3  # seconds of a timed loop that are enough


def run_steps(network: Any, params: Any, cache: Any, tokens: Any, at: Any, steps: Any) -> Any:
    """`steps` calls at the same place, each fed what the one before it predicted."""
    positions = at[:, None] + jnp.arange(tokens.shape[1])

    def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, tokens = carry
        out = network.forward(params, tokens, positions, Prefix(cache, at))
        predicted = jnp.argmax(network.logits(params, out.hidden), axis=-1).astype(jnp.int32)
        return network.write(cache, out.kv, write_after_read(at, predicted)), predicted

    return lax.fori_loop(0, steps, step, (cache, tokens))


@dataclasses.dataclass(eq=False)
class Loop:
    """A compiled loop of calls over one window, the buffers that it hands on, and the seconds of its first run."""

    network: Any
    params: Any
    window: int
    context: int
    steps: int
    compiled: Any = None
    buffers: Any = None
    at: Any = None
    first: float = 0.0

    @property
    def key(self) -> str:
        """Its name among others."""
        return f"{depth_of(self.network)} {self.window}"

    @property
    def told(self) -> str:
        """Its name in a sentence."""
        return f"{self.window} position{'s' * (self.window > 1)}{of_depth(self.network)}"

    def compile(self) -> "Loop":
        """Makes the buffers and compiles the loop, traced anew: a trace does not know what switches were on."""
        draw = np.random.default_rng(0).integers(0, self.network.vocab_size, (1, self.window))
        cache = self.network.init_cache(jax.random.split(jax.random.key(0), 1), self.context + self.window)
        self.buffers = jax.block_until_ready((cache, jnp.asarray(draw, jnp.int32)))
        self.at = jnp.full(1, self.context, jnp.int32)
        loop = jax.jit(functools.partial(run_steps, self.network), donate_argnums=(1, 2))
        self.compiled = loop.lower(self.params, *self.buffers, self.at, np.int32(self.steps)).compile()
        return self

    def __call__(self) -> Any:
        """One run of the loop."""
        self.buffers = self.compiled(self.params, *self.buffers, self.at, np.int32(self.steps))
        return self.buffers

    def foretold(self) -> float:
        """Seconds that it takes at least, roughly."""
        return self.steps * foretold(self.network, self.window, self.context)


def depth_of(network: Any) -> int | None:
    """Recurrences of a call, None of a network without."""
    return network.recurrence if "recurrences" in network.counters else None


def of_depth(network: Any) -> str:
    """The depth of a call in words."""
    depth = depth_of(network)
    return "" if depth is None else f", r = {depth}"


def warmed(loops: Sequence[Loop], task: Task, name: str) -> dict[str, Loop]:
    """The loops that ran once, the narrow ones first; those that would take too long are left out.

    A call over n positions takes at most n / m times as long as one over m < n, so the widest that ran foretells the
    next; two passes of all of them are still to come.
    """
    found: dict[str, Loop] = {}
    total = 0.0
    known: dict[int | None, tuple[int, float]] = {}  # by depth: the widest window and the seconds of a call
    for loop in sorted(loops, key=lambda loop: (loop.window, depth_of(loop.network) or 0)):
        depth = depth_of(loop.network)
        least = loop.foretold()
        if depth in known:
            width, seconds = known[depth]
            least = max(least, seconds * loop.steps * loop.window / width)
        if not task.has(4 * least + 2 * total, loop.told, name):
            continue
        with task.survives(loop.told, of=name):
            loop.first, loop.steps = lengthened(warm(loop), loop.steps)
            known[depth] = loop.window, loop.first / loop.steps
            total += loop.first
            found[loop.key] = loop
    return found


def measure_preset(name: str, task: Task) -> list[dict[str, Any]]:
    """One row for each depth and window of a preset."""
    sizes = task.sizes
    loaded = load(task, name, PRESETS[name], 3 * sizes.steps, sizes.context)
    if loaded is None:
        return []
    network = loaded.network
    depths = [network]
    if "recurrences" in network.counters:
        depths += [network.at(r) for r in sizes.depths if r != network.recurrence]
    loops = []
    for at in depths:
        for window in sizes.windows:
            loop = Loop(at, loaded.params, window, sizes.context, steps_of(at, window, sizes))
            if sizes.context + window <= network.max_length:
                loops.append(loop)
            else:
                task.leave(loop.told, f"the shape has {network.max_length} positions", name)
    compiled = task.ready({loop.told: loop.compile for loop in loops}, name)
    ready = warmed(list(compiled.values()), task, name)
    a_pass = sum(loop.first for loop in ready.values())
    passes = {
        key: [x / ready[key].steps for x in seconds]
        for key, seconds in turns(ready, sizes.passes, lambda: task.left() < a_pass).items()
    }
    base = passes.get(f"{depth_of(network)} 1")
    if base is None:
        task.leave(name, "a call over one position was not timed, which the others are compared with")
        return []
    task.passed(len(base), name)
    return [row_of(loaded, ready[key], passes[key], base) for key in passes]


def steps_of(network: Any, window: int, sizes: Sizes) -> int:
    """Calls of a timed loop: those of the sizes, or fewer where they would take more than LONG seconds."""
    enough = math.ceil(LONG / foretold(network, window, sizes.context))
    return max(min(sizes.steps, enough), 2)


def row_of(loaded: Loaded, loop: Loop, a_call: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """What was found of one window, from seconds a call; `base` are those of one position at the full depth."""
    work = loop.network.work(1, loop.window, loop.context)
    needed, interval = quicker(base, a_call)
    reads = read_seconds(loop.network, 1, loop.window, loop.context, loaded.limits)
    products = work.flops / loaded.limits.flops_per_second
    return {
        "shape": loaded.name,
        "recurrence": depth_of(loop.network),
        "window": loop.window,
        "context": loop.context,
        "calls": loop.steps,
        "a_call": list(a_call),
        "needed": needed,
        "needed_range": list(interval),
        "call_bytes": work.bytes,
        "call_flops": work.flops,
        "limit_fraction": max(reads, products) / statistics.median(a_call),
        "limit": "reads" if reads > products else "products",
    }


def measure(task: Task) -> Result:
    """The rows of every preset that fits."""
    rows: list[dict[str, Any]] = []
    for name, own in task.each(fitting(task)):
        rows += measure_preset(name, own)
    return {"dtype": task.sizes.dtype, "rows": rows}


def series(result: Mapping[str, Any]) -> dict[tuple[str, int | None], list[dict[str, Any]]]:
    """Rows by shape and depth, the narrow windows first."""
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: row["window"]):
        found.setdefault((row["shape"], row["recurrence"]), []).append(row)
    return found


def tables(result: Result) -> list[Table]:
    """A table for each shape and depth."""
    found = []
    for (shape, depth), rows in series(result).items():
        lines = [
            [
                f"{row['window']}",
                duration(statistics.median(row["a_call"])),
                f"{row['needed']:.2f} [{row['needed_range'][0]:.2f}, {row['needed_range'][1]:.2f}]",
                f"{percent(row['limit_fraction'])} ({row['limit']})",
            ]
            for row in rows
        ]
        base = "one position" if depth is None else "one position at the mean depth of the shape"
        found.append(
            Table(
                f"{shape}{'' if depth is None else f', r = {depth}'}, after {rows[0]['context']} positions",
                ("positions", "a call", "tokens a call to gain [95%]", "of the nearer limit"),
                lines,
                f"{len(rows[0]['a_call'])} passes in turns. A decoder gains where a call commits more tokens than it "
                f"costs calls over {base}.",
            )
        )
    return found


def picture(plt: Any, result: Result) -> Any:
    """Tokens a call that a decoder must commit to gain, against the positions of a call."""
    if not result["rows"]:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (shape, depth), rows in series(result).items():
        at = [row["window"] for row in rows]
        label = shape if depth is None else f"{shape}, r = {depth}"
        needed, ends = ([row[name] for row in rows] for name in ("needed", "needed_range"))
        errors = [[max(x - low, 0) for x, (low, _) in zip(needed, ends, strict=True)]]
        errors += [[max(high - x, 0) for x, (_, high) in zip(needed, ends, strict=True)]]
        panel.errorbar(at, needed, yerr=errors, fmt="o-", markersize=4, capsize=2, label=label)
    panel.plot([1, 256], [1, 256], color="0.5", linestyle="--", linewidth=1, label="as many as positions")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
    panel.set_xlabel("positions of a call")
    panel.set_ylabel("tokens a call to gain")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    return figure


CALLS = Part("calls", "The cost of a call by its positions", 4.0, measure, tables, picture)
