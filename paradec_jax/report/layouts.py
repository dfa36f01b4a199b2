"""Both sides of each choice by backend: layouts of products, the order of keys, attention."""

import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from paradec_jax.config import ModelConfig
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.evaluate.intervals import quicker, times
from paradec_jax.families import PRESETS, init_params, network_of
from paradec_jax.nn import masks
from paradec_jax.nn.attention import attend
from paradec_jax.nn.backend import SWITCH
from paradec_jax.nn.cache import KV, write_rows
from paradec_jax.report.calls import Loop
from paradec_jax.report.parts import COMPILE, Part, Result, Table, Task, duration
from paradec_jax.report.sizes import with_dtype
from paradec_jax.report.timing import lengthened, turns, warm
from paradec_jax.report.weights import load

WINDOWS = (1, 16)


@contextlib.contextmanager
def layouts(name: str) -> Iterator[None]:
    """The switch of `nn.backend` in one position, as it was afterwards."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One side of a choice; `compile` returns what runs it, and has a number of `steps`."""

    choice: str
    name: str
    window: int
    compile: Callable[[], Any]


# Whole calls


def whole(network: Any, raw: Any, task: Task) -> list[Side]:
    """Layouts for the CPU against plain ones."""

    @functools.cache
    def prepared(layout: str) -> Any:
        with layouts(layout):
            params = network.prepare(raw)
        task.saw(params)
        return params

    def loop(layout: str, window: int) -> Loop:
        params = prepared(layout)
        with layouts(layout):
            return Loop(network, params, window, task.sizes.context, task.sizes.steps).compile()

    return [
        Side("products", f"layouts {layout}", window, functools.partial(loop, layout, window))
        for window in WINDOWS
        for layout in ("plain", "cpu")
    ]


# One layer's attention


@dataclasses.dataclass(eq=False)
class Attention:
    """A compiled loop of one layer's attention after a cache, each call fed what the one before it gave."""

    compiled: Any
    buffers: tuple[Any, ...]
    steps: int

    def __call__(self) -> Any:
        """One run of the loop."""
        return self.compiled(np.int32(self.steps), *self.buffers)


def ours(rows: bool, at: Array, q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """The attention of this package over keys as columns [B, G, C, S], as it keeps them, or as rows [B, G, S, C]."""
    own = q[:, : values.shape[1]]
    columns = jnp.swapaxes(own, -1, -2)
    prefix = KV(jnp.swapaxes(keys, -1, -2) if rows else keys, values)
    window = q.shape[2]
    seen = masks.visible(at, values.shape[2])
    out = attend(q, KV(columns, own), masks.causal(window), prefix, seen)
    at = write_after_read(at, out[:, 0, :, 0].astype(jnp.int32))
    keys = write_rows(keys, own, at, -2) if rows else write_rows(keys, columns, at, -1)
    return out, keys, write_rows(values, own, at, -2)


def library(name: Any, at: Array, q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """`jax.nn.dot_product_attention` over keys and values [B, S, G, C], the window's written before they are read."""
    own = jnp.moveaxis(q[:, : values.shape[2]], 1, 2)
    keys, values = (lax.dynamic_update_slice_in_dim(x, own, at[0], 1) for x in (keys, values))
    mask = jnp.arange(keys.shape[1]) <= at[0] + jnp.arange(q.shape[2])[:, None]
    out = jax.nn.dot_product_attention(
        jnp.moveaxis(q, 1, 2), keys, values, mask=mask[None, None], implementation=name
    )
    return jnp.moveaxis(out, 2, 1), keys, values


def attention(config: ModelConfig, window: int, context: int, steps: int, side: str) -> Attention:
    """A side of the order of keys ("columns", "rows") or of the attention ("einsum", "xla", "cudnn")."""
    heads, channels = config.heads, config.head_dim
    groups = getattr(config, "kv_heads", heads)
    size, dtype = context + window, jnp.dtype(config.dtype)
    foreign = side in ("xla", "cudnn")
    shape = (1, size, groups, channels) if foreign else (1, groups, size, channels)
    values = jnp.ones(shape, dtype)
    keys = values if foreign or side == "rows" else jnp.swapaxes(values, -1, -2)
    at, q = jnp.full(1, context, jnp.int32), jnp.ones((1, heads, window, channels), dtype)
    call = functools.partial(library, side) if foreign else functools.partial(ours, side == "rows")

    def loop(steps: Any, at: Array, *carry: Array) -> Any:
        return lax.fori_loop(0, steps, lambda _, carry: call(at, *carry), carry)

    buffers = at, q, keys, values
    return Attention(jax.jit(loop).lower(np.int32(steps), *buffers).compile(), buffers, steps)


def layer(config: ModelConfig, task: Task) -> list[Side]:
    """Keys as columns against keys as rows, and the attention here against the library's."""
    library = ["xla"]
    if jax.default_backend() == "gpu" and config.dtype == "bfloat16":
        library.append("cudnn")
    sides = [("keys", "columns"), ("keys", "rows"), ("attention", "einsum")]
    sides += [("attention", name) for name in library]
    sizes = task.sizes
    return [
        Side(
            choice,
            name,
            window,
            functools.partial(attention, config, window, sizes.context, sizes.steps, name),
        )
        for window in WINDOWS
        for choice, name in sides
    ]


def told(side: Side) -> str:
    """A side in a few words."""
    return f"{side.choice} {side.name}, {side.window} position{'s' * (side.window > 1)}"


def measure_preset(name: str, task: Task) -> list[dict[str, Any]]:
    """Rows of all choices for one preset, sides in turns."""
    config = with_dtype(PRESETS[name], task.sizes.dtype)
    if load(task, name, config, 8 * task.sizes.steps, task.sizes.context) is None:
        return []
    raw = init_params(config, jax.random.key(task.sizes.seed))
    ready: dict[str, tuple[Side, Any]] = {}
    a_pass, until = 0.0, (1 - COMPILE) * task.left()
    sides = [*whole(network_of(config), raw, task), *layer(config, task)]
    for side in sorted(sides, key=lambda side: side.window):
        what = told(side)
        if task.left() < max(until, 3 * a_pass):
            task.leave(what, "no time was left to compile it", name, late=True)
            continue
        with task.survives(what, ValueError, of=name):  # an attention that does not know the shape
            call = side.compile()
            seconds, call.steps = lengthened(warm(call), call.steps)
            a_pass += seconds
            ready[what] = side, call
    calls = {what: call for what, (_, call) in ready.items()}
    found = turns(calls, task.sizes.passes, lambda: task.left() < a_pass)
    task.passed(min(map(len, found.values()), default=task.sizes.passes), name)
    a_call = {what: [x / call.steps for x in found[what]] for what, (_, call) in ready.items()}
    rows = []
    for what, (side, _) in ready.items():
        first = next(other for other in sides if (other.choice, other.window) == (side.choice, side.window))
        if told(first) not in ready:
            task.leave(what, f"{told(first)} is missing, which it is compared with", name)
            continue
        value, interval = quicker(a_call[told(first)], a_call[what])
        row = {"shape": name, "choice": side.choice, "side": side.name, "window": side.window}
        row |= {"a_call": a_call[what], "slowdown": value, "slowdown_range": list(interval)}
        rows.append(row)
    return rows


def measure(task: Task) -> Result:
    """The rows of every preset."""
    rows: list[dict[str, Any]] = []
    for name, own in task.each(task.sizes.layouts):
        rows += measure_preset(name, own)
    return {"dtype": task.sizes.dtype, "context": task.sizes.context, "rows": rows}


def tables(result: Result) -> list[Table]:
    """A table a preset."""
    found = []
    for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["shape"] == shape]
        lines = [
            [
                row["choice"],
                row["side"],
                f"{row['window']}",
                duration(statistics.median(row["a_call"])),
                times(row["slowdown"], row["slowdown_range"]),
            ]
            for row in rows
        ]
        found.append(
            Table(
                f"{shape}, after {result['context']} positions",
                ("choice", "side", "positions", "a call", "times the first side [95%]"),
                lines,
                f"{len(rows[0]['a_call'])} passes in turns. Products: a whole call of the "
                "network. Keys and attention: one layer's attention and its writes to the cache; `einsum` is the "
                "attention of this package, the others are those of `jax.nn.dot_product_attention`.",
            )
        )
    return found


LAYOUTS = Part("layouts", "Choices by backend", 1.5, measure, tables)
