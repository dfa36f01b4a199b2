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
    needed: Bool[Array, "B"] | None = None,
    bounded: bool = False,
) -> Result:
    """`call` in the first shape that fits every row, since they share the call.

    Args:
      call: shape -> arrays of the same shapes and dtypes for every shape.
      shapes: compiled shapes, the smallest first; the last one fits in any case.
      fits: which of them hold what each row needs; all of them where it has stopped.
      needed: rows that need the call; zeros where none does. None is some row always.
      bounded: the last shape, whatever is needed: reverse mode would keep something of every one.
    """
    calls = [functools.partial(call, shape) for shape in shapes]
    if bounded:
        return calls[-1]()
    smallest = functools.partial(lax.switch, jnp.argmax(jnp.all(fits, axis=0)), calls)
    return smallest() if needed is None else unless_idle(smallest, needed, calls[-1])


def unless_idle(
    call: Callable[[], Result], needed: Bool[Array, "B"], like: Callable[[], Any] | None = None
) -> Result:
    """What a call returns, or zeros where no row needs it.

    `like` has the same results and is quicker to trace.
    """

    def skip() -> Any:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(like or call))

    return lax.cond(jnp.any(needed), call, skip)
