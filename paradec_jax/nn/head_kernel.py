"""The most probable token of few rows as one kernel for GPUs (Pallas, Triton).

::

    argmax_v (x W + b)_v

Logits are float32, and a program that only asks which is the largest would write and read them for
that. Here a program of the grid keeps the largest of its columns, and so few numbers are left that
the plain argmax over them costs nothing. Of equal logits the first is the largest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from paradec_jax.nn.precision import at_least_float32

COLUMNS = 64  # tokens of a program
INPUTS = 64  # that it reads at a time


def most_probable(
    x: Float[Array, "*shape D"], weight: Array, bias: Any = None, *, tied: bool
) -> Int[Array, "*shape"]:
    """The column of the largest logit of each row; D is a multiple of 64.

    Args:
      x: at most 64 rows.
      weight: the output matrix [D, V], or with `tied` the embedding [V, D], in the dtype of x.
      bias: biases of the logits [V], or None.
    """
    (*leading, width), count = x.shape, x.size // x.shape[-1]
    rows, vocab = max(16, pl.next_power_of_2(count)), weight.shape[0 if tied else 1]
    programs = pl.cdiv(vocab, COLUMNS)
    given = {"x": x.reshape(count, width), "weight": weight}
    block = (COLUMNS, width) if tied else (width, COLUMNS)
    specs = {
        "x": pl.BlockSpec((rows, width), lambda j: (0, 0)),
        "weight": pl.BlockSpec(block, lambda j: (j, 0) if tied else (0, j)),
    }
    if bias is not None:
        given["bias"], specs["bias"] = bias, pl.BlockSpec((COLUMNS,), lambda j: (j,))
    out = pl.BlockSpec((None, rows), lambda j: (j, 0))
    most, at = pl.pallas_call(
        functools.partial(_most_probable, count=count, vocab=vocab, tied=tied),
        grid=(programs,),
        in_specs=[specs],
        out_specs=[out, out],
        out_shape=[jax.ShapeDtypeStruct((programs, rows), d) for d in (jnp.float32, jnp.int32)],
        compiler_params=triton.CompilerParams(num_stages=4),
    )(given)
    best = jnp.argmax(most, axis=0)
    return jnp.take_along_axis(at, best[None], axis=0)[0, :count].reshape(leading)


def _most_probable(of: Any, most: Any, at: Any, *, count: int, vocab: int, tied: bool) -> None:
    """The largest logit of some columns and its column; references are named as the arrays."""
    rows, width = of["x"].shape
    columns = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    real, there = (jnp.arange(rows) < count)[:, None], columns < vocab
    load = functools.partial(triton.load, other=0)

    def turn(i: Array, sums: Array) -> Array:
        where = pl.ds(i * INPUTS, INPUTS)
        x = load(of["x"].at[:, where], mask=real)
        if tied:
            weight = load(of["weight"].at[:, where], mask=there[:, None]).T
        else:
            weight = load(of["weight"].at[where, :], mask=there[None])
        return sums + triton.dot(x, weight)

    logits = lax.fori_loop(0, width // INPUTS, turn, jnp.zeros((rows, COLUMNS)))
    if "bias" in of:
        logits += at_least_float32(load(of["bias"].at[:], mask=there))
    logits = jnp.where(there, logits, -jnp.inf)
    largest = jnp.max(logits, axis=1)
    first = jnp.min(jnp.where(logits == largest[:, None], columns, vocab - 1), axis=1)
    most[:], at[:] = largest, first
