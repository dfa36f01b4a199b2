"""Attention of a short window over a cached prefix and itself as one kernel for GPUs (Pallas,
Triton).

::

    queries, keys    norm and rotation of a head's window
    scores           of the window under its mask, then of the cache, `POSITIONS` at a time
    softmax          in one pass: weights e^(s - m), their sum and the mixed values are scaled anew
                     when the largest score m so far grows (arXiv 1805.02867, algorithm 3)

A program of the grid computes one query head of one row. Keys and values are read where they lie
and as far as a row sees any of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from paradec_jax.nn.precision import at_least_float32

POSITIONS = 64  # of the cache that are scored at a time


def window_attention(
    heads: dict[str, Array],
    gains: Any,
    angles: Any,
    seen: Array,
    prefix: Any,
    visible: Any,
    *,
    eps: float,
) -> Any:
    """The attended window [B, W, H, C] and its keys [B, G, C, W] after norm and rotation.

    Channels of a head are a power of two, at least 32, and its halves turn together.

    Args:
      heads: "q" [B, W, H, C], "k" and "v" [B, W, G, C] after bias, and cached ones in one dtype.
      gains: gains [C] of the norms of "q" and "k", where heads are normalised.
      angles: cosines and sines [B, W, C/2].
      seen: which of its own positions each sees, [B, W, W].
      prefix: cached keys [B, G, C, S] and values [B, G, S, C], or None.
      visible: which of those each position sees, [B, W, S].
      eps: what these norms add under their roots.
    """
    (batch, width, count, channels), groups = heads["q"].shape, heads["k"].shape[2]
    each, rows = count // groups, max(16, pl.next_power_of_2(width))  # as tensor cores need
    size = 0 if visible is None else visible.shape[2]
    room = size + -size % POSITIONS
    head, row = (None, rows, None, channels), lambda b, h: (b, 0, 0)
    group, none = lambda b, h: (b, h // each, 0, 0), (None, None)
    blocks = {
        "q": (head, lambda b, h: (b, 0, h, 0)),
        "k v": (head, lambda b, h: (b, 0, h // each, 0)),
        "q_gain k_gain": ((channels,), lambda b, h: (0,)),
        "cos sin": ((None, rows, channels // 2), row),
        "seen": ((None, rows, rows), row),
        "visible": ((None, rows, room), row),
        "keys": ((*none, channels, room), group),
        "values": ((*none, room, channels), group),
        "reach": ((None,), lambda b, h: (b,)),
    }
    specs = {n: pl.BlockSpec(*block) for names, block in blocks.items() for n in names.split()}
    given = heads | {"cos": angles[0], "sin": angles[1], "seen": seen.astype(jnp.int8)}
    given |= {f"{name}_gain": gain for name, gain in gains.items()}
    if size:
        reach = jnp.max(visible * jnp.arange(1, size + 1), axis=(1, 2))
        given |= {"keys": prefix[0], "values": prefix[1], "reach": reach}
        given |= {"visible": visible.astype(jnp.int8)}
    shapes = heads["q"].shape, (batch, groups, channels, width)
    return pl.pallas_call(
        functools.partial(_window_attention, width=width, eps=eps),
        grid=(batch, count),
        in_specs=[{name: specs[name] for name in given}],
        out_specs=[specs["q"], pl.BlockSpec((*none, channels, rows), group)],
        out_shape=[jax.ShapeDtypeStruct(shape, heads["q"].dtype) for shape in shapes],
        compiler_params=triton.CompilerParams(),
    )(given)


def _window_attention(of: Any, out: Any, keys: Any, *, width: int, eps: float) -> None:
    """One head of one row; references are named as the arrays."""
    (rows, channels), dtype = out.shape, out.dtype
    parts = pl.ds(0, channels // 2), pl.ds(channels // 2, channels // 2)
    real = jnp.arange(rows) < width

    def load(name: str, columns: Any = slice(None), there: Any = True) -> Array:
        """Columns of the window's rows."""
        return triton.load(of[name].at[:, columns], mask=real[:, None] & there, other=0)

    def turned(name: str) -> list[Array]:
        """Both halves of a head's channels [rows, C/2], after norm and rotation."""
        x, gain = [at_least_float32(load(name, part)) for part in parts], f"{name}_gain"
        if gain in of:
            scale = lax.rsqrt(sum(jnp.sum(y * y, axis=1) for y in x) / channels + eps)[:, None]
            x = [y * scale * of[gain][part] for y, part in zip(x, parts, strict=True)]
        (a, b), cos, sin = x, load("cos"), load("sin")
        return [y.astype(dtype) for y in (a * cos - b * sin, b * cos + a * sin)]

    def scores(columns: Any, seen: Array) -> Array:
        s = sum(map(triton.dot, queries, columns)) * channels**-0.5
        return jnp.where(seen != 0, s, -3e38)  # whoever sees nothing mixes what nobody reads

    queries, window = turned("q"), [k.T for k in turned("k")]
    for part, k in zip(parts, window, strict=True):  # each head of a group stores the same
        triton.store(keys.at[part, :], k, mask=real[None])
    s = scores(window, load("seen", there=real[None]))
    most = jnp.max(s, axis=1)
    weights = jnp.exp(s - most[:, None])
    carry = most, jnp.sum(weights, axis=1), triton.dot(weights.astype(dtype), load("v"))

    def further(i: Array, carry: Any) -> Any:
        """The positions of the cache from number `i POSITIONS` on."""
        most, total, mixed = carry
        where = pl.ds(i * POSITIONS, POSITIONS)
        there = i * POSITIONS + jnp.arange(POSITIONS) < of["reach"][...]
        cached = functools.partial(triton.load, other=0)
        columns = [cached(of["keys"].at[part, where], mask=there[None]) for part in parts]
        s = scores(columns, load("visible", where, there[None]))
        new = jnp.maximum(most, jnp.max(s, axis=1))
        weights, kept = jnp.exp(s - new[:, None]), jnp.exp(most - new)
        values = cached(of["values"].at[where, :], mask=there[:, None])
        mixed = mixed * kept[:, None] + triton.dot(weights.astype(dtype), values)
        return new, total * kept + jnp.sum(weights, axis=1), mixed

    if "keys" in of:
        carry = lax.fori_loop(0, pl.cdiv(of["reach"][...], POSITIONS), further, carry)
    _, total, mixed = carry
    triton.store(out.at[:, :], (mixed / total[:, None]).astype(dtype), mask=real[:, None])
