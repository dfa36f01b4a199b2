"""Blocks in flight: the canvas of those that are read together, and the call that reads them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas import AnyBlocks, BlockCanvas, Choice
from paradec_jax.decode.machine import Prefix, on_smallest
from paradec_jax.decode.machine.rows import is_stop
from paradec_jax.decode.rules import last_of, pad_slots, put, select, shift, where_rows, window
from paradec_jax.records import pytree


@pytree
class FlightCanvas(BlockCanvas):
    """A canvas of which up to R blocks are read together, counted from `cached` on.

    Attributes:
      step: calls that each of them was read in, [B, R].
      looks: calls that read each of them without a mask, [B, R].
      count: blocks that are in flight or wait to be stored, [B].
      ready: the first ones, which are final: the next call stores them, [B].
    """

    step: Int[Array, "B R"]
    looks: Int[Array, "B R"]
    count: Int[Array, "B"]
    ready: Int[Array, "B"]

    @classmethod
    def of_blocks(cls, canvas: BlockCanvas, most: int) -> "FlightCanvas":
        """A fresh canvas, of which no block is in flight."""
        none, each = canvas.step, jnp.zeros((len(canvas.step), most), jnp.int32)
        return cls(**vars(canvas) | {"step": each}, looks=each + 0, count=none, ready=none + 0)

    def slots(self, x: Array) -> Array:
        """`x` [B, S] of these blocks, [B, R, W]."""
        batch, count = self.step.shape
        return window(x, self.cached, count * self.block).reshape(batch, count, self.block)

    def enough(self, share: Array) -> Bool[Array, "B R"]:
        """Blocks of which that share is shown, whatever the rounding."""
        return jnp.sum(self.slots(self.shown), axis=2) >= share * self.block - 1e-4

    def full(self, share: Array) -> Bool[Array, "B R"]:
        """Blocks that follow one of which that share is shown; all of what is cached is."""
        before = self.enough(share)[:, :-1]
        return jnp.pad(before, [(0, 0), (1, 0)], constant_values=True)

    def admitted(self, flight: int, share: Array, rows: Bool[Array, "B"]) -> "FlightCanvas":
        """One block more in these rows, where the last one is shown to that share and no stop token
        is.
        """
        last = jnp.maximum(self.count - 1, 0)[:, None]
        enough = jnp.take_along_axis(self.enough(share), last, axis=1)[:, 0] | (self.count == 0)
        fits = self.count - self.ready < flight
        begins = self.cached + self.count * self.block < self.rows.limit
        ends = jnp.any(is_stop(self.rows.tokens, self.rows.stop) & self.unsealed, axis=1)
        more = rows & enough & fits & begins & ~ends & ~self.rows.done
        return dataclasses.replace(self, count=self.count + more)

    def taken(
        self,
        choice: Choice,
        reads: Bool[Array, "B R"],
        edit: Array | None,
        looks: Array | None,
    ) -> tuple["FlightCanvas", Bool[Array, "B R W"], Int[Array, "B"]]:
        """The canvas after a choice in the blocks that were read.

        Args:
          choice: what is revealed.
          reads: blocks that were read.
          edit: confidence above which a shown token is replaced; None where none is.
          looks: calls without masks after which a block is final in any case.

        Returns:
          The canvas, which edited positions it has, and how many of the first blocks are final:
          without masks, and unchanged by a call that saw it so.
        """
        masked = self.slots(self.open)
        clean = reads & ~jnp.any(masked, axis=2)
        final, upto = reads & ~jnp.any(masked & ~choice.where, axis=2), None
        seen, edited = self.looks + clean, jnp.zeros_like(choice.where)
        if edit is not None:
            other = choice.tokens != self.slots(self.rows.tokens)
            edited = self.slots(self.unsealed) & reads[..., None] & other & (choice.scores > edit)
            assert looks is not None  # nor is one without the other
            final &= (clean & ~jnp.any(edited, axis=2)) | (seen >= looks)
        run = select.leading_run(final)
        if edit is not None:
            upto = self.cached + self.block * run
        flat = jax.tree.map(lambda x: x.reshape(len(x), -1), (choice, edited))
        tokens, log_probs, where = flat[0].tokens, flat[0].log_probs, flat[0].where | flat[1]
        canvas = dataclasses.replace(
            self,
            rows=self.rows.write(tokens, where, self.cached, log_probs),
            shown=put(self.shown, jnp.ones_like(where), self.cached, where),
            step=self.step + reads,
            looks=seen,
        )
        return canvas.seal(upto), edited, run

    def passed(
        self,
        stored: Int[Array, "B"],
        run: Int[Array, "B"],
        hidden: Float[Array, "B _ D"],
        cache: Any,
    ) -> "FlightCanvas":
        """The canvas after its first blocks, which the cache holds; `run` of the blocks were final."""
        length, previous = self.block * stored, self.previous
        if previous is not None:
            previous = where_rows(stored > 0, last_of(hidden, jnp.maximum(length, 1)), previous)
        return dataclasses.replace(
            self,
            cache=cache,
            cached=self.cached + length,
            step=shift(self.step, stored),
            looks=shift(self.looks, stored),
            count=self.count - stored,
            ready=jnp.maximum(run - stored, 0),
            previous=previous,
        )


@pytree
class FlightRead:
    """What a call read of each row.

    Attributes:
      at: first position of its keys and values, [B].
      reads: blocks in flight that it read, [B, R].
      kv: keys and values from `at` on, for the cache.
      hidden: hidden states of these blocks, [B, R W, D]; zero of the others.
      choice: what was made of them.
    """

    at: Int[Array, "B"]
    reads: Bool[Array, "B R"]
    kv: Any
    hidden: Float[Array, "B _ D"]
    choice: Choice


def read_blocks(
    decoder: Any,
    params: Any,
    canvas: AnyBlocks,
    reads: Bool[Array, "B R"],
    choose: Callable[[Array], Choice],
) -> tuple[AnyBlocks, FlightRead]:
    """One call on the first blocks from each row's trusted cache on, each of which sees those before
    it; in the smallest of a few compiled shapes.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: the canvas, whose blocks begin at `cached`.
      reads: blocks that each row reads, the first ones.
      choose: what to make of the hidden states [B, r W, D] of the first r blocks, [B, R, ...].

    Returns:
      The canvas with counts, and what was read.
    """
    network, at, block, most = decoder.network, canvas.cached, canvas.block, reads.shape[1]
    count, width = jnp.sum(reads, axis=1, dtype=jnp.int32), most * block
    tokens, slot = window(canvas.rows.tokens, at, width), jnp.arange(width) // block

    def call(size: int) -> tuple[Any, ...]:
        fed, place = tokens[:, : size * block], at[:, None] + jnp.arange(size * block)
        mask = slot[: size * block, None] >= slot[: size * block]
        out = network.forward(params, fed, place, Prefix(canvas.cache, at), mask)
        kv = network.widen(out.kv, width) if size < most else out.kv
        return kv, pad_slots(out.hidden, width), choose(out.hidden), out.counts

    sizes = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
    fits = count[:, None] <= jnp.asarray(sizes)
    kv, hidden, choice, counts = on_smallest(call, sizes, fits, bounded=decoder.bounded)
    hidden = jnp.where(jnp.repeat(reads, block, axis=1)[..., None], hidden, 0)
    return canvas.spend(counts, block * count), FlightRead(at, reads, kv, hidden, choice)
