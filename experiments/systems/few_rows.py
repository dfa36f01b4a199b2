"""What a call over a few positions costs, the library and a plain program in turns.

    python -m experiments.systems.few_rows --shapes smollm2-135m --out few_rows.json
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m experiments.systems.few_rows    # as a processor without bfloat16

The plain program is what one would write for one shape: no batch, no modules, keys and values
stored before they are read, activations in float32 whatever its matrices are in. It reads the
library's arrays and makes the same calls: embedding, blocks over 256 cached positions, output
product, most probable tokens. Of a model of full attention 256 positions are the whole canvas,
read without a cache, and fewer are a block in its middle that sees the rest in the cache. Weights
are random. Every program runs once in each pass, in a loop of about 0.2 seconds. Run it on idle
cores.
"""

import argparse
import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from experiments.common.ratios import quicker
from experiments.common.record import write_record
from experiments.systems import calls
from experiments.systems.machine import Clock, in_turns
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.decode import Prefix
from paradec_jax.evaluate.intervals import ends
from paradec_jax.families import PRESETS

SHAPES = ("smollm2-135m", "qwen2.5-coder-0.5b", "tiny-causal", "tiny-recurrent")
DTYPES = ("float32", "bfloat16")
POSITIONS = (1, 2, 4, 8, 16, 32)


def dot(x: Array, matrix: Array) -> Array:
    """Rows [W, D] times a matrix of D rows and one or two more axes, sums in float32."""
    # one row alone is slow
    rows = jnp.concatenate([x, x]) if len(x) == 1 and matrix.dtype != x.dtype else x
    out = lax.dot(
        rows.astype(matrix.dtype),
        matrix.reshape(x.shape[1], -1),
        preferred_element_type=jnp.float32,
    )
    return out[: len(x)].reshape(len(x), *matrix.shape[1:])


class Plain:
    """The plain program of a causal transformer or a recurrent one; `scores` is the function, `run`
    its loop.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.recurrent = config, isinstance(config, RecurrentDepthConfig)
        self.full = config.visibility == "full"

    def norm(self, x: Array, gain: Array | None) -> Array:
        scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.config.norm_eps)
        return x if gain is None else x * scale * gain

    def turned(self, x: Array, angle: Array) -> Array:
        """Heads [W, H, C] turned by their positions' angles [W, 1, C/2]."""
        a, b = (x[..., ::2], x[..., 1::2]) if self.recurrent else jnp.split(x, 2, -1)
        a, b = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
        return (
            jnp.stack([a, b], -1).reshape(x.shape)
            if self.recurrent
            else jnp.concatenate([a, b], -1)
        )

    def attention(self, x: Array, p: Mapping[str, Any], cache: Any, at: Array, angle: Array) -> Any:
        """A window's attention, and the cache with its keys [G, C, S] and values [G, S, C]."""
        heads = {name: dot(x, p[name]) + p.get(f"{name}_bias", 0) for name in "qkv"}
        q, k = (self.turned(self.norm(heads[i], p.get(f"{i}_norm")), angle) for i in "qk")
        keys = lax.dynamic_update_slice(cache[0], k.transpose(1, 2, 0), (0, 0, at))
        values = lax.dynamic_update_slice(cache[1], heads["v"].swapaxes(0, 1), (0, at, 0))
        q = q.reshape(len(x), len(keys), -1, q.shape[-1]).transpose(1, 2, 0, 3)  # [G, R, W, C]
        seen = self.full | (jnp.arange(keys.shape[2]) <= at + jnp.arange(len(x))[:, None])
        scores = jnp.einsum("grwc,gcs->grws", q, keys) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        mixed = jnp.einsum("grws,gsc->wgrc", weights, values).reshape(len(x), -1)
        return dot(mixed, p["out"].reshape(mixed.shape[1], -1)), (keys, values)

    def block(self, x: Array, p: Mapping[str, Any], cache: Any, at: Array, angle: Array) -> Any:
        names = (
            [f"norm_{i}" for i in range(1, 5)]
            if self.recurrent
            else ["attention_norm", "", "mlp_norm", ""]
        )
        before, between, after, last = (p.get(name) for name in names)
        mixed, cache = self.attention(self.norm(x, before), p["attention"], cache, at, angle)
        x, mlp = self.norm(x + mixed, between), p["mlp"]
        h = self.norm(x, after)
        out = dot(jax.nn.silu(dot(h, mlp["gate"])) * dot(h, mlp["up"]), mlp["down"])
        return self.norm(x + out, last), cache

    def scores(
        self, p: Any, cache: Any, tokens: Array, at: Array, latents: Array
    ) -> tuple[Array, Any]:
        """Scores [W, V] of a window, and the cache; a recurrent model starts from `latents` [W, D]."""
        c, cache = self.config, dict(cache)
        exponent = jnp.arange(0, c.head_dim, 2, dtype=jnp.float32) / c.head_dim
        angle = (at + jnp.arange(len(tokens)))[:, None, None] / c.rope_base**exponent

        def blocks(x: Array, part: str, count: int) -> Array:
            for name in (f"{part}_{i}" for i in range(count)):
                x, cache[name] = self.block(x, p[name], cache[name], at, angle)
            return x

        x = p["embedding"][tokens].astype(jnp.float32)
        if self.recurrent:
            e = blocks(x * c.width**0.5, "prelude", c.prelude_layers)
            for _ in range(calls.RECURRENCE):
                x = dot(jnp.concatenate([latents, e], -1), p["adapter"])
                latents = blocks(x, "core", c.core_layers)
            x = blocks(self.norm(latents, p["final_norm"]), "coda", c.coda_layers)
        else:
            x = blocks(x, "layer", c.layers)
        return dot(self.norm(x, p["final_norm"]), p["head"]), cache

    def run(self, p: Any, cache: Any, tokens: Array, latents: Array, at: Array, steps: Any) -> Any:
        """`steps` calls at one place, each on the tokens that the one before it predicted."""

        def step(_: Array, carry: Any) -> Any:
            cache, tokens = carry
            scores, cache = self.scores(p, cache, tokens, at, latents)
            return cache, jnp.argmax(scores, -1).astype(jnp.int32)

        return *lax.fori_loop(0, steps, step, (cache, tokens)), latents


def plain_loop(config: Any, ours: calls.CallLoop) -> calls.CallLoop:
    """The plain program on the parameters and the window of the library's loop."""
    plain, params, (cache, tokens) = Plain(config), ours.params.params, ours.buffers
    size = calls.CONTEXT + (0 if plain.full else tokens.shape[1])
    layers = {name: p["attention"] for name, p in params.items() if isinstance(p, Mapping)}
    heads = {name: p["k"].shape[1:] for name, p in layers.items()}
    zeros = {
        name: (jnp.zeros((g, c, size)), jnp.zeros((g, size, c))) for name, (g, c) in heads.items()
    }
    latents = (
        cache.initial[0, calls.CONTEXT :].astype(jnp.float32) if plain.recurrent else jnp.zeros(0)
    )
    buffers, at = (zeros, jnp.array(tokens[0]), latents), ours.at[0]
    program = (
        jax.jit(plain.run, donate_argnums=(1, 2, 3))
        .lower(params, *buffers, at, np.int32(1))
        .compile()
    )
    return calls.CallLoop(program, params, buffers, at)


def read_blocks(
    network: Any, params: Any, cache: Any, tokens: Array, at: Array, steps: Any
) -> tuple[Any, Array]:
    """`steps` calls on a block of a canvas, each on the tokens that the one before it predicted."""
    width = tokens.shape[1]
    positions, mask = at[:, None] + jnp.arange(width), jnp.ones((1, width, width), bool)
    places = jnp.arange(calls.CONTEXT)
    prefix = Prefix(cache, (places < at[:, None]) | (places >= at[:, None] + width))

    def step(_: Array, tokens: Array) -> Array:
        out = network.forward(params, tokens, positions, prefix, mask)
        return jnp.argmax(network.logits(params, out.hidden), axis=-1).astype(jnp.int32)

    return cache, lax.fori_loop(0, steps, step, tokens)


def library_loop(config: Any, params: Any, positions: int) -> calls.CallLoop:
    """The library's loop; of a model of full attention on a block of the canvas, or on all of it."""
    loop = calls.call_loop(config, params, positions, calls.CONTEXT)
    if config.visibility != "full" or positions == calls.CONTEXT:
        return loop
    network, (_, tokens) = calls.network_at(config), loop.buffers
    cache = network.init_cache(jax.random.split(jax.random.key(0), 1), calls.CONTEXT)
    at, read = jnp.full(1, calls.CONTEXT // 2), functools.partial(read_blocks, network)
    program = jax.jit(read, donate_argnums=(1, 2)).lower(params, cache, tokens, at, np.int32(1))
    return calls.CallLoop(program.compile(), params, (cache, tokens), at)


def measure(name: str, positions: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """Rows of a shape: a call of the library and one of the plain program, all of them in turns."""
    loops: dict[Any, calls.CallLoop] = {}
    for dtype in DTYPES:
        config = dataclasses.replace(PRESETS[name], dtype=dtype, param_dtype=dtype)
        params = calls.network_at(config).prepare(calls.random_params(config))
        for n in positions:
            loops[dtype, n, "library"] = library_loop(config, params, n)
            loops[dtype, n, "plain"] = plain_loop(config, loops[dtype, n, "library"])
    calls.settle_steps(loops)
    timings = in_turns(loops, Clock(), passes)
    rows = []
    for dtype, n in itertools.product(DTYPES, positions):
        pair = {
            who: timings[dtype, n, who].each(loops[dtype, n, who].steps)
            for who in ("library", "plain")
        }
        ratio, interval = quicker(pair["library"].wall, pair["plain"].wall)
        row = {
            "shape": name,
            "dtype": dtype,
            "positions": n,
            "speed": ratio,
            "interval": ends(interval),
        }
        rows.append(row | {who: dataclasses.asdict(timing) for who, timing in pair.items()})
        quickest = ", ".join(
            f"{who} {1e3 * min(timing.wall):.2f} ms" for who, timing in pair.items()
        )
        print(
            f"{name}, {dtype}, {n} positions: {quickest}, {ratio:.2f} times the plain speed",
            flush=True,
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, choices=list(PRESETS), metavar="PRESET"
    )
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS)
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("few_rows.json"), help="path of the JSON")
    options, rows = parser.parse_args(), []
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    for name in options.shapes:
        rows += measure(name, options.positions, options.passes)
        write_record(options.out, vars(options) | flags, {"rows": rows}, dtypes=DTYPES)


if __name__ == "__main__":
    main()
