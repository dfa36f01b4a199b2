"""The state of block decoders, and the call on what follows each row's trusted cache.

::

    position   0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4, limit = 10
    tokens     p p p p | a _ c _ | _ _ _ _
    cache      trusted | scratch |                cached = 4, length = 5

Blocks count from position 0, so the first one may hold the end of the prompt. The open block is
read again and again after the trusted cache, and what is computed of it meanwhile is scratch: its
keys were made while masks were there. Once it has no mask it is read a last time, and stored. That
call may read the next block along with it: the block before is as clean there as it will ever be in
the cache.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from paradec_jax.decode.canvas.canvas import Canvas, Choice
from paradec_jax.decode.machine import Prefix, Reading, TreeCall, Windows, forward_tree
from paradec_jax.decode.rules import number_of, where_rows, window, write_after_read
from paradec_jax.records import pytree, static


@pytree
class BlockRead:
    """What a call read of each row: a block to be stored, the open block after it, or both.

    Attributes:
      hidden: final hidden states of the open block's positions, [B, W, D].
      window: hidden states of all positions from `at` on, [B, _, D].
      at: first position that the call read, [B].
      kv: keys and values of the positions from `at` on, for the cache.
      reads: running rows whose open block was read, [B].
      stored: rows of which a block without masks was read, [B].
      prompt: whether this is the prompt's call.
    """

    hidden: Float[Array, "B W D"]
    window: Float[Array, "B _ D"]
    at: Int[Array, "B"]
    kv: Any
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    prompt: bool = static(default=False)


@pytree
class BlockCanvas(Canvas):
    """A canvas of blocks, and the cache of those that are complete.

    Attributes:
      cache: keys and values.
      cached: trusted entries of the cache, those of whole blocks, [B]; the open block begins there.
      step: steps done in the open block, [B].
      previous: hidden state of the last stored position, [B, 1, D]; None where logits are about
        their own position.
    """

    cache: Any
    cached: Int[Array, "B"]
    step: Int[Array, "B"]
    previous: Float[Array, "B 1 D"] | None

    @property
    def clean(self) -> Bool[Array, "B"]:
        """Running rows whose next block to be stored has no mask left."""
        return (self.rows.length >= self.cached + self.block) & ~self.rows.done

    def masked(self, rows: Bool[Array, "B"]) -> Bool[Array, "B W"]:
        """Masked positions of the open block in these rows."""
        return window(self.open, self.cached, self.block) & rows[:, None]

    def aligned(self, hidden: Float[Array, "B W D"]) -> Float[Array, "B W D"]:
        """Hidden states about the open block's positions; with next-token logits of those before."""
        if self.previous is None:
            return hidden
        return jnp.concatenate([self.previous, hidden[:, :-1]], axis=1)

    def after_block(
        self: "AnyBlocks", stored: Bool[Array, "B"], length: Any, last: Float[Array, "B 1 D"]
    ) -> "AnyBlocks":
        """The canvas at the next block, in rows that store one.

        Args:
          stored: rows whose block is stored, [B].
          length: positions of the block.
          last: hidden state of its last position.
        """
        previous = None if self.previous is None else where_rows(stored, last, self.previous)
        return dataclasses.replace(
            self,
            cached=self.cached + length * stored,
            step=jnp.where(stored, 0, self.step),
            previous=previous,
        )

    def store(
        self: "AnyBlocks",
        network: Any,
        call: BlockRead,
        tokens: Int[Array, "B _"],
        steps: Int[Array, "B"] | int = 1,
    ) -> "AnyBlocks":
        """The canvas after a call, whose keys are stored.

        Args:
          network: network of the cache.
          call: what was read.
          tokens: as for `write_after_read`.
          steps: steps that the call did in the open block, where it read one.
        """
        cache = network.write(self.cache, call.kv, write_after_read(call.at, tokens))
        return dataclasses.replace(self, cache=cache, step=self.step + call.reads * steps)

    def with_choice(self: "AnyBlocks", choice: Choice) -> "AnyBlocks":
        """The canvas after a choice in the open block."""
        return self.show(choice.tokens, choice.where, self.cached, choice.log_probs).seal()

    def path(
        self, call: TreeCall, block: Float[Array, "B W D"], stored: Bool[Array, "B"]
    ) -> BlockRead:
        """What counts of a call on states of each row's block, and perhaps on the next block.

        Args:
          call: what `read_states` returned.
          block: hidden states of the state that counts.
          stored: rows whose block has no mask in that state, so that the next one is open.
        """
        opened, both, fused = block, block, call.windows.parent is not None
        if fused:
            after = call.each[:, -1]
            opened = where_rows(stored, after, block)
            both = jnp.concatenate([block, after], axis=1)
        reads = ~self.rows.done & (~stored | fused)
        return BlockRead(opened, both, call.windows.at[:, 0], call.kv, reads, stored)


AnyBlocks = TypeVar("AnyBlocks", bound=BlockCanvas)


def read_states(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    states: Shaped[Array, "B K W *rest"],
    reads: Bool[Array, "B K"],
    clean: Int[Array, "B"],
    follows: Bool[Array, "B"] | None,
    vectors: Shaped[Array, "B S D"] | None = None,
    causal: Bool[Array, "B W"] | None = None,
) -> tuple[AnyBlocks, TreeCall]:
    """One call on K states of each row's block, and on the next block after one of them.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: the canvas, whose block begins at `cached`.
      states: the states, tokens or vectors.
      reads: states that each row reads.
      clean: the state whose keys and values are handed on, and which the next block sees.
      follows: rows that read the next block; None where it is never read.
      vectors: what is read in place of the canvas's tokens.
      causal: rows of the states that see no later one of their block; None where all see it whole.

    Returns:
      The canvas with counts, and hidden states of the K states and, after them, of the next block.
    """
    at, block, count = canvas.cached, canvas.block, states.shape[1]
    if follows is not None:
        inputs = canvas.rows.tokens if vectors is None else vectors
        states = jnp.concatenate([states, window(inputs, at + block, block)[:, None]], axis=1)
        reads = jnp.concatenate([reads, follows[:, None]], axis=1)
    is_next = jnp.arange(states.shape[1]) == count
    begin = at[:, None] + block * is_next
    parent = None if follows is None else jnp.where(is_next, clean[:, None], -1)
    if causal is not None:
        causal = causal[:, None] & ~is_next[:, None]
    call = forward_tree(
        decoder.network,
        params,
        Prefix(canvas.cache, at),
        Windows(states, begin, reads, parent, causal=causal),
        functools.partial(Reading, kept=clean),
        smaller=((0,),) if parent is None else ((0,), (0, count), (*range(count),)),
        bounded=decoder.bounded,
    )
    return canvas.spend(call.counts, block * number_of(reads)), call
