"""How the rows of a call meet a matrix: the one product of every network.

::

    operands           product
    float32, float64   in that type
    bfloat16           sums in float32, rounded once to bfloat16, or not at all (`wide`: logits)

A matrix meets rows in their dtype: `Network.prepare` casts it before a decoding loop, and a
training step casts it in place. The product of few rows that XLA's CPU backend wants is in no
program that is lowered for another one.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from paradec_jax.nn.backend import cpu_layouts


def dense(
    x: Float[Array, "*shape D"], weight: Float[Array, "D F"], wide: bool = False
) -> Float[Array, "*shape F"]:
    """`x W`, in the dtype of `x` or in at least float32; on the CPU (`nn.backend`) of a matrix of
    all positions.

    With two leading axes the weight's gradient contracts both, which XLA's CPU backend does through
    transposed copies; a matrix halved the time of an MLP's backward pass there.

    There too, under `jax.default_matmul_precision("BF16_BF16_F32")` float32 operands are rounded to
    bfloat16 here, forward and backward, and sums stay float32: XLA's CPU backend ignores that
    setting, and its bfloat16 products are five times as fast as its float32 ones where the
    processor has matrix units.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32) if wide else x.dtype
    once = functools.partial(_product, dtype=dtype)
    if cpu_layouts() or x.dtype != jnp.bfloat16 or x.ndim == 1 or math.prod(x.shape[:-1]) > 1:
        return once(x, weight)
    # A single row, fed twice: of a 1,024 x 3,072 matrix an H100 makes its product in 6.0 us, that
    # of one in 11.5.
    return lax.platform_dependent(
        x, weight, cuda=lambda x, weight: once(jnp.concatenate([x, x]), weight)[:1], default=once
    )


def _product(
    x: Float[Array, "*shape D"], weight: Float[Array, "D F"], dtype: Any
) -> Float[Array, "*shape F"]:
    """`x W` in that type."""
    cpu, wide = cpu_layouts(), dtype != x.dtype
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    rounded = cpu and precision == "BF16_BF16_F32" and x.dtype == jnp.float32
    rows = x.reshape(-1, x.shape[-1]) if cpu else x  # of any rank, a vector too
    if rounded:
        product = _narrow(rows, weight, dtype)
    elif x.dtype == jnp.bfloat16 and (cpu or wide):
        product = _narrow(rows, weight.astype(x.dtype), dtype)
    else:
        product = jnp.einsum(
            "...d,df->...f", rows, weight.astype(x.dtype), preferred_element_type=dtype
        )
    return product.reshape(*x.shape[:-1], weight.shape[-1]) if cpu else product


def _contract(a: Array, b: Array, over: tuple[Any, Any], dtype: Any) -> Array:
    return lax.dot_general(a, b, (over, ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow(
    x: Float[Array, "*shape D"], weight: Float[Array, "D F"], dtype: Any
) -> Float[Array, "*shape F"]:
    """The product of operands rounded to bfloat16, in `dtype`; so are those of its gradient."""
    return _narrow_forward(x, weight, dtype)[0]


def _narrow_forward(x: Array, weight: Array, dtype: Any) -> tuple[Array, Any]:
    like = jnp.zeros((), x.dtype), jnp.zeros((), weight.dtype)
    operands = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)

    def anywhere(x: Array, weight: Array) -> Array:
        return _contract(x, weight, ((x.ndim - 1,), (0,)), dtype)

    def on_cpu(x: Array, weight: Array) -> Array:
        # A product that is asked for in bfloat16 casts the whole matrix to float32 first, four
        # times its own cost. One row would be multiplied number by number: 120 ms where two rows
        # take 10 (20 layers of 576 x 1,536).
        rows = jnp.concatenate([x, x]) if len(x) == 1 else x
        return _contract(rows, weight, ((1,), (0,)), jnp.float32)[: len(x)].astype(dtype)

    if not cpu_layouts():
        return anywhere(*operands), (operands, like)
    return lax.platform_dependent(*operands, cpu=on_cpu, default=anywhere), (operands, like)


def _narrow_backward(dtype: Any, saved: Any, gradient: Array) -> tuple[Array, Array]:
    (x, weight), like = saved
    gradient, sums = gradient.astype(jnp.bfloat16), jnp.float32 if cpu_layouts() else jnp.bfloat16
    leading = tuple(range(x.ndim - 1))
    of_x = _contract(gradient, weight, ((x.ndim - 1,), (1,)), sums)
    of_weight = _contract(x, gradient, (leading, leading), sums)
    return of_x.astype(like[0].dtype), of_weight.astype(like[1].dtype)


_narrow.defvjp(_narrow_forward, _narrow_backward)
