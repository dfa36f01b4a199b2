"""Products of few rows with matrices as one kernel for GPUs (Pallas, Triton), with what is before
and after them.

::

    y_i = norm(x) W_i              matrices of one input, such as queries, keys and values
    y   = silu(x W_1) * (x W_2)    gated
    y   = gelu(x W + b)            by the approximation with tanh
    y   = x W + add                a branch's end and its residual sum

Few rows wait for the matrix: each program of the grid reads some columns of it, from first to last
input, and no sum is split over programs. The factor of a norm is one number a row, so it multiplies
the sums: norm(x) W = ((x gain) W) / sqrt(mean(x^2) + eps).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from paradec_jax.nn.precision import at_least_float32

NUMBERS = 8192  # that a program reads at a time, at most: four turns share its memory
COLUMNS = 64  # of a program, at most
PROGRAMS = 128  # that fill a device: fewer columns a program below that
FEWEST = 16  # rows, and columns, of a product on tensor cores


def products(
    x: Array,
    weights: Any,
    gain: Any = None,
    add: Any = None,
    bias: Any = None,
    *,
    eps: float = 0.0,
) -> list[Array]:
    """The product of rows x [..., D] with each matrix [D, F_i], or of two of one shape the gated one.

    D is a multiple of 64, each F_i one of 16.

    Args:
      x: at most 64 rows.
      weights: of each product its matrix, or its gate and what that gates, in the dtype of x.
      gain: gain [D] of the norm that x passes first, or None.
      add: what is added to the only product [..., F], or None.
      bias: bias [F] of the only product, which then passes GELU, or None.
      eps: what that norm adds under its root.
    """
    (*leading, width), count = x.shape, x.size // x.shape[-1]
    rows = max(FEWEST, pl.next_power_of_2(count))
    sizes = [of[0].shape[1] for of in weights]
    # The largest powers of two that divide all.
    wanted = max(sum(sizes) // PROGRAMS, FEWEST)
    columns = math.gcd(*sizes, min(pl.next_power_of_2(wanted), COLUMNS))
    fitting = NUMBERS // (rows + columns * len(weights[0]))
    inputs = math.gcd(width, pl.next_power_of_2(fitting // 2 + 1))
    starts = [sum(sizes[:i]) // columns for i in range(len(sizes) + 1)]

    def part(height: int, i: int) -> Any:
        """The columns of product i; other programs hold its first or last ones and leave them."""
        first, after = starts[i : i + 2]
        return pl.BlockSpec((height, columns), lambda j: (0, jnp.clip(j, first, after - 1) - first))

    given = {"x": x.reshape(count, width), "weights": weights}
    specs: dict[str, Any] = {"x": pl.BlockSpec((rows, width), lambda j: (0, 0))}
    specs["weights"] = [[part(width, i) for _ in of] for i, of in enumerate(weights)]
    if gain is not None:
        given["gain"], specs["gain"] = gain, pl.BlockSpec((width,), lambda j: (0,))
    if add is not None:
        given["add"], specs["add"] = add.reshape(count, -1), part(rows, 0)
    if bias is not None:
        given["bias"], specs["bias"] = bias, pl.BlockSpec((columns,), lambda j: (j,))
    outs = pl.pallas_call(
        functools.partial(_products, starts=starts, count=count, inputs=inputs, eps=eps),
        grid=(starts[-1],),
        in_specs=[specs],
        out_specs=[part(rows, i) for i in range(len(sizes))],
        out_shape=[jax.ShapeDtypeStruct((count, size), x.dtype) for size in sizes],
        compiler_params=triton.CompilerParams(num_stages=4),
    )(given)
    return [out.reshape(*leading, -1) for out in outs]


def _products(of: Any, *outs: Any, starts: Any, count: int, inputs: int, eps: float) -> None:
    """Some columns of one product; references are named as the arrays."""
    (rows, columns), dtype = outs[0].shape, outs[0].dtype
    real, width = (jnp.arange(rows) < count)[:, None], of["x"].shape[1]
    load = functools.partial(triton.load, mask=real, other=0)

    def product(weights: Any, out: Any) -> None:
        def turn(i: Array, carry: Any) -> Any:
            sums, squares = carry
            where = pl.ds(i * inputs, inputs)
            x = load(of["x"].at[:, where])
            if "gain" in of:
                squares += jnp.sum(jnp.square(at_least_float32(x)), axis=1)
                x = x * of["gain"][where].astype(dtype)
            return [
                s + triton.dot(x, w[where, :]) for s, w in zip(sums, weights, strict=True)
            ], squares

        zeros = [jnp.zeros((rows, columns)) for _ in weights]
        sums, squares = lax.fori_loop(0, width // inputs, turn, (zeros, jnp.zeros(rows)))
        if "gain" in of:
            sums = [s * lax.rsqrt(squares / width + eps)[:, None] for s in sums]
        y, *gated = sums
        if gated:
            y = jax.nn.silu(y) * gated[0]
        if "bias" in of:
            y = jax.nn.gelu(y + at_least_float32(of["bias"][:]), approximate=True)
        if "add" in of:
            y += load(of["add"].at[:, :])
        triton.store(out.at[:, :], y.astype(dtype), mask=real)

    j = pl.program_id(0)
    for i, (weights, out) in enumerate(zip(of["weights"], outs, strict=True)):
        mine = (starts[i] <= j) & (j < starts[i + 1])
        pl.when(mine)(functools.partial(product, weights, out))
