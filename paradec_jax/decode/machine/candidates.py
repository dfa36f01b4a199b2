"""Candidates: several guesses of the same positions, side by side in one window, sharing one prefix.

::

    tokens     a b c | d e f | g h i        R = 3 candidates of W = 3 tokens
    positions  p . . | p . . | p . .        each stands at the same positions
    mask       causal within a candidate; no candidate sees another

Where a decoder often has one candidate, or a short one, a call of that shape is compiled beside the largest.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from paradec_jax.decode.rules.windows import window
from paradec_jax.nn import masks


def fold_candidates(
    tokens: Int[Array, "B R W"], at: Int[Array, "B"]
) -> tuple[Int[Array, "B RW"], Int[Array, "B RW"], Bool[Array, "RW RW"] | None]:
    """Tokens, positions and mask of a window that holds every candidate; no mask where there is one.

    Args:
      tokens: R candidates of W tokens.
      at: position of each candidate's first token.
    """
    batch, count, width = tokens.shape
    positions = jnp.tile(at[:, None] + jnp.arange(width), (1, count))
    mask = masks.side_by_side(count, width) if count > 1 else None
    return tokens.reshape(batch, count * width), positions, mask


def pick(
    x: Shaped[Array, "B RW *rest"], candidate: Int[Array, "B"], width: int
) -> Shaped[Array, "B W *rest"]:
    """What belongs to one candidate of each row, of an array over the whole window."""
    return window(x, candidate * width, width)


Shape = tuple[int, int]  # candidates and the tokens of each
Result = TypeVar("Result")


def on_smallest(
    call: Callable[[Shape], Result],
    counts: Sequence[int],
    widths: Sequence[int],
    count: Int[Array, "B"],
    width: Int[Array, "B"],
    running: Bool[Array, "B"],
) -> Result:
    """`call` in the smallest shape that holds the candidates of every running row, which share the call.

    Args:
      call: shape -> arrays of the same shapes and dtypes for every shape.
      counts, widths: compiled numbers of candidates and of tokens, each ascending; every pair is a shape.
      count, width: what each row has.
      running: rows that count.
    """
    shapes = list(itertools.product(sorted(set(counts)), sorted(set(widths))))
    if len(shapes) == 1:
        return call(shapes[0])
    most, widest = (jnp.max(jnp.where(running, x, 1)) for x in (count, width))
    holds = jnp.stack([(most <= r) & (widest <= w) for r, w in shapes])
    return lax.switch(jnp.argmax(holds), [functools.partial(call, shape) for shape in shapes])


def place(x: Shaped[Array, "B r w *rest"], count: int, width: int) -> Shaped[Array, "B R W *rest"]:
    """What belongs to a few short candidates among `count` of `width`, zeros elsewhere."""
    extra = [(0, count - x.shape[1]), (0, width - x.shape[2])]
    return jnp.pad(x, [(0, 0), *extra, *[(0, 0)] * (x.ndim - 3)])
