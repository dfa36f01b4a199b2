"""Which positions of a window qualify, given a score for each: pure functions on [B, W].

All take traced numbers, and the lower position wins a tie. `open_` marks the positions that may be
chosen. NaN is the lowest score, but `top` takes it before a position that is not open.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def leading_run(qualified: Bool[Array, "B W"]) -> Int[Array, "B"]:
    """Length of the leading run of positions that qualify: all up to it must."""
    return jnp.sum(jnp.cumprod(qualified.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def leading(qualified: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """The leading run itself.

    ::

        qualified   x x . x x
        leading     x x . . .
    """
    return jnp.cumprod(qualified.astype(jnp.int32), axis=1) > 0


def first_run(open_: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """The first unbroken run of open positions.

    ::

        open        . x x . x
        first run   . x x . .
    """
    begun = jnp.cumsum(open_.astype(jnp.int32), axis=1) > 0
    return open_ & leading(open_ | ~begun)


def first(open_: Bool[Array, "B W"], count: Int[Array, "B"] | int) -> Bool[Array, "B W"]:
    """The first `count` open positions, from left to right.

    ::

        open        . x . x x
        first 2     . x . x .
    """
    rank = jnp.cumsum(open_.astype(jnp.int32), axis=1)
    return open_ & (rank <= _column(count, open_))


def top(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], count: Int[Array, "B"] | int
) -> Bool[Array, "B W"]:
    """The `count` open positions of highest score, whatever the scores are: none for 0, all where
    there are fewer.

    ::

        scores      9 4 7 5 1
        open        . x x x x
        top 2       . . x x .
    """
    ranked = jnp.lexsort((-scores, ~open_), axis=1)  # open ones first; sorts put NaN last
    rank = jnp.argsort(ranked, axis=1)
    return open_ & (rank < _column(count, open_))


def best(scores: Float[Array, "B V"], count: int) -> Int[Array, "B count"]:
    """The indices of the `count` highest scores, the highest first.

    By maxima, which sharded rows have by themselves: XLA gathers the scores of all rows for
    `top_k`.
    """
    index, chosen = jnp.arange(scores.shape[-1]), []
    for _ in range(count):
        chosen.append(jnp.argmax(scores, axis=-1).astype(jnp.int32))
        scores = jnp.where(index == chosen[-1][:, None], -jnp.inf, scores)
    return jnp.stack(chosen, axis=1)


def _column(count: Int[Array, "B"] | int, like: Bool[Array, "B W"]) -> Int[Array, "B 1"]:
    return jnp.broadcast_to(jnp.asarray(count, jnp.int32), like.shape[:1])[:, None]
