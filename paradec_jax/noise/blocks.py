"""Noise of block diffusion: which labelled tokens of packed samples are hidden, and how likely each
was to be.

::

    sample   p = (1 - e) t + e, t ~ U(0, 1) drawn for each sample; its tokens are hidden one by one       (SDAR)
    block    the same with a t for each block                                     (BD3-LM, arXiv 2503.09573)
    count    of a block's n labelled tokens k are hidden, k ~ U{1 .. n}; p = k / n

What hidden tokens cost, each weighed by 1 / p, is in the mean the same bound under all three. A row
without a hidden token is drawn anew, ten times at most; then one of its labelled tokens is hidden.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_words

KINDS = ("sample", "block", "count")
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
      kind: "sample", "block" or "count".
    """

    kind: str = "sample"

    def __post_init__(self) -> None:
        check_words(self, kind=KINDS)

    def draw(
        self,
        key: Array,
        labelled: Bool[Array, "B T"],
        samples: Int[Array, "B T"],
        blocks: Int[Array, "B T"],
    ) -> Hidden:
        """Hides some of the labelled tokens.

        Args:
          key: of the draw.
          labelled: tokens that may be hidden.
          samples, blocks: the number of each token's sample and block in its row, from 0 and never
            falling.
        """

        def empty(hidden: Hidden) -> Bool[Array, "B"]:
            return jnp.any(labelled, axis=1) & ~jnp.any(hidden.where, axis=1)

        def again(carry: tuple[Array, Hidden]) -> Array:
            count, hidden = carry
            return (count <= REDRAWS) & jnp.any(empty(hidden))

        def redraw(carry: tuple[Array, Hidden]) -> tuple[Array, Hidden]:
            count, hidden = carry
            new = self.once(jax.random.fold_in(key, count), labelled, samples, blocks)
            rows = empty(hidden)[:, None]
            return count + 1, jax.tree.map(lambda n, o: jnp.where(rows, n, o), new, hidden)

        first = self.once(jax.random.fold_in(key, 0), labelled, samples, blocks)
        _, hidden = lax.while_loop(again, redraw, (jnp.int32(1), first))
        uniforms = jax.random.uniform(jax.random.fold_in(key, REDRAWS + 1), labelled.shape)
        one = jnp.argmax(jnp.where(labelled, uniforms, -1.0), axis=1)
        forced = empty(hidden)[:, None] & (jnp.arange(labelled.shape[1]) == one[:, None])
        return Hidden(hidden.where | forced, hidden.probability)

    def once(self, key: Array, labelled: Array, samples: Array, blocks: Array) -> Hidden:
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
        return Hidden(labelled & (uniforms < probability), probability)


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
