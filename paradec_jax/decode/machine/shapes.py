"""How much of a call runs: the smallest compiled shape that holds what rows need, or nothing."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

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
    first = jnp.argmax(jnp.all(fits, axis=0))
    if needed is not None:  # one choice, on which a host waits once
        first = jnp.where(jnp.any(needed), first, len(calls))
        calls.append(functools.partial(zeros_of, calls[-1]))
    return lax.switch(first, calls)


def unless_idle(call: Callable[[], Result], needed: Bool[Array, "B"]) -> Result:
    """What a call returns, or zeros where no row needs it."""
    return lax.cond(jnp.any(needed), call, functools.partial(zeros_of, call))


def zeros_of(call: Callable[[], Result]) -> Result:
    """Zeros in the place of what a call returns."""
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(call))
