"""How much of a call runs: the smallest compiled shape that holds what rows need, or nothing."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

Shape = TypeVar("Shape")
Result = TypeVar("Result")


def on_smallest(
    call: Callable[[Shape], Result],
    shapes: Sequence[Shape],
    fits: Bool[Array, "B shapes"],
) -> Result:
    """`call` in the first shape that fits every row, since they share the call.

    Args:
      call: shape -> arrays of the same shapes and dtypes for every shape.
      shapes: compiled shapes, the smallest first; the last one fits in any case.
      fits: which of them hold what each row needs; all of them where it has stopped.
    """
    if len(shapes) == 1:
        return call(shapes[0])
    first = jnp.argmax(jnp.all(fits, axis=0))
    return lax.switch(first, [functools.partial(call, shape) for shape in shapes])


def unless_idle(
    call: Callable[[], Result], needed: Bool[Array, "B"], like: Callable[[], Any] | None = None
) -> Result:
    """What a call returns, or zeros where no row needs it.

    `like` has the same results and is quicker to trace.
    """

    def skip() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(like or call))

    return lax.cond(jnp.any(needed), call, skip)
