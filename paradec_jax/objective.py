"""Losses as sums over a batch and their weights, so that the parts of a batch add up to the whole.

A mean of means is not the mean where parts count unequal numbers of tokens; sums are divided once,
at the end::

    rows     sum of nats, tokens
    0 .. 3   12.0, 8
    4 .. 7    1.0, 1               loss = 13.0 / 9, not (1.5 + 1.0) / 2
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from paradec_jax.records import record

PyTree = Any
Metrics = dict[str, jax.Array]
Batch = dict[str, Array]  # arrays of a batch by name


class Sum(NamedTuple):
    """A sum over a batch, and the weight by which it is to be divided.

    Attributes:
      total: the sum.
      weight: sum of the weights, such as the number of tokens; it must not depend on parameters.
    """

    total: Float[Array, "*shape"]
    weight: Float[Array, "*shape"]

    @property
    def mean(self) -> Float[Array, "*shape"]:
        """`total / weight`, and 0 where nothing counts."""
        return self.total / jnp.where(self.weight == 0, 1, self.weight)


Sums = dict[str, Sum]


def weighted(values: Shaped[Array, "*shape"], weights: Shaped[ArrayLike, "*shape"]) -> Sum:
    """The sum of `weights * values`, with the sum of the weights; truth values count as 0 and 1."""
    weights = jnp.asarray(weights, jnp.result_type(values, jnp.float32))
    return Sum(jnp.sum(weights * values), jnp.sum(weights))


def drawn(value: Any) -> Sum:
    """A number that belongs to a batch as a whole, such as a draw: parts of a batch average it."""
    return Sum(jnp.asarray(value, jnp.float32), jnp.ones((), jnp.float32))


def means(sums: Sums) -> tuple[jax.Array, Metrics]:
    """The mean named "loss", and all other means as metrics."""
    return sums["loss"].mean, {name: part.mean for name, part in sums.items() if name != "loss"}


@record
class Objective:
    """A loss as a pair of pure functions; called, it is `value(sums(...))`, a scalar to
    differentiate and metrics.

    Attributes:
      sums: `(params, frozen, batch, key) -> sums`, each a total and a weight over the rows of the
        batch, so that the sums of micro-batches add up to those of the whole batch.
      value: `sums -> (loss, metrics)`; the loss must be linear in the totals, and divide by nothing
        but weights.
    """

    sums: Callable[[PyTree, PyTree, PyTree, jax.Array], Sums]
    value: Callable[[Sums], tuple[jax.Array, Metrics]] = means

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: Any
    ) -> tuple[jax.Array, Metrics]:
        """The loss of a whole batch, and its metrics."""
        return self.value(self.sums(params, frozen, batch, key))
