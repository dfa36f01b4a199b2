"""What a call over a few positions costs, the library and a plain program in turns.

    python -m experiments.systems.few_rows --shapes smollm2-135m --out few_rows.json
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m experiments.systems.few_rows    # as a processor without bfloat16

The plain program is what one would write for this one shape: no batch, no modules, keys and values stored before they
are read, activations in float32 whatever its matrices are in. It reads the same arrays as the library and makes the
same calls: embedding, blocks over 256 cached positions, output product, most probable tokens. Weights are random.
Every program runs once in each pass, in loops of about 0.2 seconds. Run it on idle cores.
"""

import argparse
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from experiments.common.record import write_record
from experiments.systems import report
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.evaluate.intervals import ends, quicker
from paradec_jax.families import PRESETS

SHAPES = ("smollm2-135m", "qwen2.5-coder-0.5b", "tiny-causal", "tiny-recurrent")
DTYPES = ("float32", "bfloat16")
POSITIONS = (1, 2, 4, 8, 16, 32)
Layer = Mapping[str, Any]


def dot(x: Array, matrix: Array) -> Array:
    """The product of rows with a matrix of two or three axes, sums in float32."""
    if matrix.dtype == jnp.float32:
        return x @ matrix
    rows = jnp.concatenate([x, x]) if len(x) == 1 else x  # one row alone is slow
    return lax.dot(rows.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32)[: len(x)]


class Plain:
    """The plain program of a causal transformer, or of a recurrent one."""

    def __init__(self, config: Any) -> None:
        self.config, self.recurrent = config, isinstance(config, RecurrentDepthConfig)

    def norm(self, x: Array, gain: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.config.norm_eps) * gain

    def turned(self, x: Array, angle: Array) -> Array:
        """Heads [W, H, C] turned by their positions' angles [W, 1, C/2]."""
        a, b = (x[..., ::2], x[..., 1::2]) if self.recurrent else jnp.split(x, 2, -1)
        a, b = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
        return jnp.stack([a, b], -1).reshape(x.shape) if self.recurrent else jnp.concatenate([a, b], -1)

    def attention(self, x: Array, p: Layer, cache: Any, at: Array, angle: Array) -> tuple[Array, Any]:
        """A window's attention, and the cache with its keys [G, C, S] and values [G, S, C]."""
        width, heads = len(x), {}
        for name in "qkv":
            heads[name] = dot(x, p[name].reshape(x.shape[1], -1)).reshape(width, *p[name].shape[1:])
            heads[name] = heads[name] + p.get(f"{name}_bias", 0)
            if f"{name}_norm" in p:
                heads[name] = self.norm(heads[name], p[f"{name}_norm"])
        q, k = self.turned(heads["q"], angle), self.turned(heads["k"], angle)
        keys = lax.dynamic_update_slice(cache[0], k.transpose(1, 2, 0), (0, 0, at))
        values = lax.dynamic_update_slice(cache[1], heads["v"].swapaxes(0, 1), (0, at, 0))
        q = q.reshape(width, len(keys), -1, q.shape[-1]).transpose(1, 2, 0, 3)  # [G, R, W, C]
        seen = jnp.arange(keys.shape[2]) <= at + jnp.arange(width)[:, None]
        scores = jnp.einsum("grwc,gcs->grws", q, keys) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        mixed = jnp.einsum("grws,gsc->wgrc", weights, values).reshape(width, -1)
        return dot(mixed, p["out"].reshape(mixed.shape[1], -1)), (keys, values)

    def block(self, x: Array, p: Layer, cache: Any, at: Array, angle: Array) -> tuple[Array, Any]:
        names = (
            [f"norm_{i}" for i in range(1, 5)] if self.recurrent else ["attention_norm", "", "mlp_norm", ""]
        )
        before, between, after, last = (p.get(name) for name in names)
        mixed, cache = self.attention(self.norm(x, before), p["attention"], cache, at, angle)
        x = x + mixed if between is None else self.norm(x + mixed, between)
        h, mlp = self.norm(x, after), p["mlp"]
        out = dot(jax.nn.silu(dot(h, mlp["gate"])) * dot(h, mlp["up"]), mlp["down"])
        return (x + out if last is None else self.norm(x + out, last)), cache

    def logits(self, p: Any, cache: Any, tokens: Array, at: Array, start: Any) -> tuple[Array, Any]:
        """Scores [W, V] of a window, and the cache; `start`: first latents of a recurrent model [W, D]."""
        c, cache = self.config, dict(cache)
        exponent = jnp.arange(0, c.head_dim, 2, dtype=jnp.float32) / c.head_dim
        angle = (at + jnp.arange(len(tokens)))[:, None, None] / c.rope_base**exponent

        def blocks(x: Array, part: str, count: int) -> Array:
            for name in (f"{part}_{i}" for i in range(count)):
                x, cache[name] = self.block(x, p[name], cache[name], at, angle)
            return x

        x = p["embedding"][tokens].astype(jnp.float32)
        if self.recurrent:
            e, state = blocks(x * c.width**0.5, "prelude", c.prelude_layers), start
            for _ in range(report.RECURRENCE):
                state = blocks(dot(jnp.concatenate([state, e], -1), p["adapter"]), "core", c.core_layers)
            x = blocks(self.norm(state, p["final_norm"]), "coda", c.coda_layers)
        else:
            x = blocks(x, "layer", c.layers)
        return dot(self.norm(x, p["final_norm"]), p["head"]), cache

    def run(self, params: Any, cache: Any, tokens: Array, start: Any, at: Array, steps: Any) -> Any:
        """`steps` calls at one place, each on the tokens that the one before it predicted."""

        def step(_: Array, carry: Any) -> Any:
            scores, cache = self.logits(params, *carry, at, start)
            return cache, jnp.argmax(scores, -1).astype(jnp.int32)

        return *lax.fori_loop(0, steps, step, (cache, tokens)), start


def plain_loop(config: Any, like: report.CallLoop) -> report.CallLoop:
    """The plain program on the parameters and the window of the library's loop."""
    plain, params, (cache, tokens) = Plain(config), like.params.params, like.buffers
    at, size = like.at[0], report.CONTEXT + tokens.shape[1]
    heads = {name: p["attention"]["k"].shape[1:] for name, p in params.items() if "attention" in p}
    zeros = {name: (jnp.zeros((g, c, size)), jnp.zeros((g, size, c))) for name, (g, c) in heads.items()}
    start = cache.initial[0, report.CONTEXT :].astype(jnp.float32) if plain.recurrent else jnp.zeros(0)
    buffers = zeros, jnp.array(tokens[0]), start
    program = jax.jit(plain.run, donate_argnums=(1, 2, 3)).lower(params, *buffers, at, np.int32(1)).compile()
    return report.CallLoop(program, params, buffers, at)


def measure(name: str, dtypes: Sequence[str], positions: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """Rows of a shape: a call of the library and one of the plain program, all of them in turns."""
    loops: dict[str, report.CallLoop] = {}
    for dtype in dtypes:
        config = dataclasses.replace(PRESETS[name], dtype=dtype, param_dtype=dtype)
        params = report.network_at(config).prepare(report.random_params(config))
        for n in positions:
            loops[f"{dtype} {n}"] = report.call_loop(config, params, n, report.CONTEXT)
            loops[f"{dtype} {n} plain"] = plain_loop(config, loops[f"{dtype} {n}"])
    for _ in range(2):  # warms up, then foretells how many calls a timing needs
        for key, timing in report.in_turns(loops, report.Clock(), 1).items():
            loops[key].steps = min(max(math.ceil(report.LONG / timing.seconds), 1), 512)
    timings = report.in_turns(loops, report.Clock(), passes)
    each = {key: timing.each(loops[key].steps) for key, timing in timings.items()}
    rows = []
    for dtype, n in itertools.product(dtypes, positions):
        ours, plain = each[f"{dtype} {n}"], each[f"{dtype} {n} plain"]
        ratio, interval = quicker(ours.wall, plain.wall)
        row = {
            "shape": name,
            "dtype": dtype,
            "positions": n,
            "plain_speedup": ratio,
            "interval": ends(interval),
        }
        rows.append(row | {"library": dataclasses.asdict(ours), "plain": dataclasses.asdict(plain)})
        quickest = " ".join(
            f"{1e3 * min(one.wall):8.2f} ms ({1e3 * min(one.busy):.2f} busy)" for one in (ours, plain)
        )
        print(f"{name:20s} {dtype:9s} {n:3d} {quickest}  {ratio:.2f}", flush=True)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=list(PRESETS), metavar="PRESET")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS)
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("few_rows.json"), help="path of the JSON")
    options, rows = parser.parse_args(), []
    for name in options.shapes:
        rows += measure(name, options.dtypes, options.positions, options.passes)
        told = {**vars(options), "flags": os.environ.get("XLA_FLAGS", "")}
        write_record(options.out, told, {"rows": rows}, dtypes=options.dtypes)


if __name__ == "__main__":
    main()
