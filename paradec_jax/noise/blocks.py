"""Noise of block diffusion: which labelled tokens of packed samples are hidden, and how likely each
was to be.

::

    sample   p = (1 - e) t + e, t ~ U(0, 1) drawn for each sample; its tokens are hidden one by one       (SDAR)
    block    the same with a t for each block                                     (BD3-LM, arXiv 2503.09573)
    count    of a block's n labelled tokens k are hidden, k ~ U{1 .. n}; p = k / n
    group    in a group of consecutive blocks p rises from one to the next       (MultiBD, arXiv 2606.29215)

What hidden tokens cost, each weighed by 1 / p, is in the mean the same bound under the first three.
A row without a hidden token is drawn anew, ten times at most; then one of its labelled tokens is
hidden.

Groups are what several blocks in flight look like: the later, the less is known. Of each::

    low ~ U(0.001, 0.3), high ~ U(0.5, 1), h = high - 0.01 (high - low), floor ~ U(low, h)
    p_1 ~ U(floor, h), p_(i+1) ~ U(p_i, h)
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_number, check_words

KINDS = ("sample", "block", "count", "group")
REDRAWS = 10
EPSILON = 1e-3  # e, the smallest probability; counts have none


class Hidden(NamedTuple):
    """Which tokens are hidden, and the probability with which; it means nothing elsewhere."""

    where: Bool[Array, "B T"]
    probability: Float[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class BlockNoise:
    """How tokens are chosen.

    Attributes:
      kind: "sample", "block", "count" or "group".
      group: F, blocks of the largest group.
    """

    kind: str = "sample"
    group: int = 4

    def __post_init__(self) -> None:
        check_words(self, kind=KINDS)
        check_number("group", self.group, 2)

    def groups(
        self,
        key: Array,
        positions: Int[Array, "B T"],
        block: Int[Array, "B"],
        blocks: Int[Array, "B T"],
    ) -> Int[Array, "B T"]:
        """The number of each token's group in its row: by kind "group" 2 to F consecutive blocks of
        a sample, of a size and a place that are drawn for each row; else each block alone.

        Args:
          key: PRNG key of the draw.
          positions: place of each token in its sample.
          block: length of the blocks of each row.
          blocks: number of each token's block in its row.
        """
        if self.kind != "group":
            return blocks
        of_size, of_place = jax.random.split(key)
        size = jax.random.randint(of_size, (len(block), 1), 2, self.group + 1)
        place = jax.random.randint(of_place, size.shape, 0, size) + positions // block[:, None]
        begins = first_of_each(blocks) & ((place % size == 0) | (positions == 0))
        return jnp.cumsum(begins, axis=1) - 1

    def draw(
        self,
        key: Array,
        labelled: Bool[Array, "B T"],
        samples: Int[Array, "B T"],
        blocks: Int[Array, "B T"],
        groups: Int[Array, "B T"] | None = None,
    ) -> Hidden:
        """Hides some of the labelled tokens.

        Args:
          key: PRNG key of the draw.
          labelled: tokens that may be hidden.
          samples, blocks, groups: the number of each token's sample, block and group in its row,
            from 0 and never falling; a group that is not given is a block.
        """

        def empty(hidden: Hidden) -> Bool[Array, "B"]:
            return jnp.any(labelled, axis=1) & ~jnp.any(hidden.where, axis=1)

        def again(carry: tuple[Array, Hidden]) -> Array:
            count, hidden = carry
            return (count <= REDRAWS) & jnp.any(empty(hidden))

        def redraw(carry: tuple[Array, Hidden]) -> tuple[Array, Hidden]:
            count, hidden = carry
            new = self.once(jax.random.fold_in(key, count), labelled, samples, blocks, groups)
            rows = empty(hidden)[:, None]
            return count + 1, jax.tree.map(lambda n, o: jnp.where(rows, n, o), new, hidden)

        first = self.once(jax.random.fold_in(key, 0), labelled, samples, blocks, groups)
        _, hidden = lax.while_loop(again, redraw, (jnp.int32(1), first))
        uniforms = jax.random.uniform(jax.random.fold_in(key, REDRAWS + 1), labelled.shape)
        one = jnp.argmax(jnp.where(labelled, uniforms, -1.0), axis=1)
        forced = empty(hidden)[:, None] & (jnp.arange(labelled.shape[1]) == one[:, None])
        return Hidden(hidden.where | forced, hidden.probability)

    def once(
        self,
        key: Array,
        labelled: Array,
        samples: Array,
        blocks: Array,
        groups: Array | None = None,
    ) -> Hidden:
        """As `draw`, where a row may be left without a hidden token."""
        of_levels, of_tokens = jax.random.split(key)
        levels = jax.random.uniform(of_levels, labelled.shape)
        uniforms = jax.random.uniform(of_tokens, labelled.shape)
        # One level for each sample, or for each block.
        t = jnp.take_along_axis(levels, samples if self.kind == "sample" else blocks, axis=1)
        if self.kind == "count":
            # Of the n labelled tokens of a block the k with the smallest numbers.
            count = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=labelled.shape[1]))
            n = jnp.take_along_axis(count(labelled.astype(jnp.int32), blocks), blocks, axis=1)
            # k ~ U{1 .. n}: 1 + floor(t n)
            k = jnp.minimum(1 + (t * n).astype(jnp.int32), n)
            smallest = _ranks(uniforms, labelled, blocks) < k
            return Hidden(labelled & smallest, k / jnp.maximum(n, 1))
        probability = (1 - EPSILON) * t + EPSILON
        if self.kind == "group":
            of_groups = jax.random.fold_in(of_levels, 1)
            probability = rising(of_groups, t, blocks, blocks if groups is None else groups)
        return Hidden(labelled & (uniforms < probability), probability)


def rising(
    key: Array, t: Float[Array, "B T"], blocks: Int[Array, "B T"], groups: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """p of each token by kind "group", given a number t of [0, 1) of its block."""
    drawn = jax.random.uniform(key, (3, *t.shape))
    low, high, floor = (jnp.take_along_axis(x, groups, axis=1) for x in drawn)
    low, high = 0.001 + 0.299 * low, 0.5 + 0.5 * high
    high = high - 0.01 * (high - low)
    floor = low + floor * (high - low)
    # h - p_i = (h - floor) (1 - t_1) .. (1 - t_i), each block of the group once
    left = jnp.where(first_of_each(blocks), jnp.log1p(-t), 0)
    upto, begins = jnp.cumsum(left, axis=1), first_of_each(groups)
    begin = lax.cummax(jnp.where(begins, jnp.arange(t.shape[1]), 0), axis=1)
    return high - (high - floor) * jnp.exp(upto - jnp.take_along_axis(upto - left, begin, axis=1))


def monotone(key: Array, blocks: Int[Array, "B T"], low: float, high: float) -> Float[Array, "B T"]:
    """D2F's p of each token, by the number of its block, from 0 (arXiv 2508.09192).

    ::

        p_1 ~ U(low, high), p_(i+1) = p_i + u_i (high - p_1) / (n - 1), u_i ~ U(0, 1)

    n counts the blocks of the row; tokens of a negative number have those of block 0.
    """
    of_first, of_steps = jax.random.split(key)
    first = jax.random.uniform(of_first, (len(blocks), 1), minval=low, maxval=high)
    step = (high - first) / jnp.maximum(jnp.max(blocks, axis=1, keepdims=True), 1)
    rises = jax.random.uniform(of_steps, blocks.shape).at[:, 0].set(0)
    every = first + step * jnp.cumsum(rises, axis=1)
    return jnp.take_along_axis(every, jnp.maximum(blocks, 0), axis=1)


def choose(
    key: Array, still: Bool[Array, "B T"], blocks: Int[Array, "B T"], counts: Int[Array, "C"]
) -> Bool[Array, "B T"]:
    """In each block some of the positions `still`, any as likely as another, or all where there are
    too few.

    How many is one of `counts`, drawn for each block.
    """
    of_order, of_count = jax.random.split(key)
    rank = _ranks(jax.random.uniform(of_order, still.shape), still, blocks)
    drawn = counts[jax.random.randint(of_count, still.shape, 0, len(counts))]
    return still & (rank < jnp.take_along_axis(drawn, blocks, axis=1))


def _ranks(
    uniforms: Float[Array, "B T"], where: Bool[Array, "B T"], blocks: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The place of each number among those of its block's tokens `where`, the smallest first."""
    # Blocks follow one another, so that a block keeps its place when tokens are sorted within
    # blocks.
    order = jnp.lexsort((jnp.where(where, uniforms, 2.0), blocks))
    places = jnp.where(first_of_each(blocks), jnp.arange(blocks.shape[1]), 0)
    return jnp.argsort(order, axis=1) - lax.cummax(places, axis=1)


def first_of_each(blocks: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Which tokens begin a block, by the number of each token's block."""
    after = blocks[:, 1:] != blocks[:, :-1]
    return jnp.concatenate([jnp.ones_like(blocks[:, :1], bool), after], axis=1)
