"""The state of block decoders and their network calls: read the prompt, read a block, store a block.

::

    position   0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4, limit = 10
    tokens     p p p p | a _ c _ | _ _ _ _
    cache      trusted | scratch |                cached = 4, length = 5

Blocks count from position 0, so the first one may hold the end of the prompt. The open block is read again and again
after the trusted cache, and what is computed of it meanwhile is scratch: its keys were made while masks were there.
Once it has no mask it is read a last time, and stored. That call may read the next block along with it: the block
before is as clean there as it will ever be in the cache.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.rules import Choice
from paradec_jax.decode.machine.candidates import Following, Sizes, forward_candidates, unless_idle
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.masked.canvas import Canvas
from paradec_jax.decode.rules.windows import last_of, where_rows, window, write_after_read
from paradec_jax.nn import masks

AnyBlocks = TypeVar("AnyBlocks", bound="BlockCanvas")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockRead:
    """What a call of the network read of each row: a block to be stored, the open block after it, or both.

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
    prompt: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCanvas(Canvas):
    """A canvas of blocks, and the cache of those that are complete.

    Attributes:
      cache: keys and values.
      cached: trusted entries of the cache, those of whole blocks, [B]; the open block begins there.
      step: steps done in the open block, [B].
      previous: hidden state of the last stored position, [B, 1, D]; None where logits are about their own position.
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
        """Hidden states about the open block's positions: with next-token logits, those of the positions before."""
        if self.previous is None:
            return hidden
        return jnp.concatenate([self.previous, hidden[:, :-1]], axis=1)

    def after_block(
        self: AnyBlocks, stored: Bool[Array, "B"], length: Any, last: Float[Array, "B 1 D"]
    ) -> AnyBlocks:
        """The canvas at the next block, in rows that store one of `length` positions that ends with state `last`."""
        previous = None if self.previous is None else where_rows(stored, last, self.previous)
        return dataclasses.replace(
            self,
            cached=self.cached + length * stored,
            step=jnp.where(stored, 0, self.step),
            previous=previous,
        )

    def store(self: AnyBlocks, network: Any, call: BlockRead, tokens: Int[Array, "B W"]) -> AnyBlocks:
        """The canvas after a step in what a call read, its keys stored; `tokens` as for `write_after_read`."""
        cache = network.write(self.cache, call.kv, write_after_read(call.at, tokens))
        return dataclasses.replace(self, cache=cache, step=self.step + call.reads)

    def with_choice(self: AnyBlocks, choice: Choice) -> AnyBlocks:
        """The canvas after a choice in the open block."""
        return self.reveal(choice.tokens, choice.where, self.cached, choice.log_probs)


def fresh(decoder: Any, request: Request, overrun: int = 0) -> BlockCanvas:
    """The canvas before any call: given tokens, masks, an empty cache; room for a window of two blocks."""
    block = decoder.block
    canvas = Canvas.of(decoder.begin(request, 2 * block, overrun), decoder.mask, block)
    rows = canvas.rows
    return BlockCanvas(
        **vars(canvas),
        cache=decoder.empty_cache(request, rows.tokens.shape[1]),
        cached=rows.length // block * block,
        step=jnp.zeros_like(rows.length),
        previous=None,
    )


def read_prompt(
    decoder: Any, params: Any, canvas: AnyBlocks, given: int, opens: bool, vectors: Array | None = None
) -> tuple[AnyBlocks, BlockRead]:
    """Reads the whole blocks that each row is given in one call, and commits nothing.

    Args:
      canvas: fresh canvas.
      given: positions of the request, P.
      opens: read each row's open block along with them. Otherwise a row without a whole block calls nothing.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
    """
    network, block, cached = decoder.network, canvas.block, canvas.cached
    width = max(given // block * block + block * opens, block)

    def call() -> tuple[Any, ...]:
        positions = jnp.broadcast_to(jnp.arange(width), (len(cached), width))
        inputs = (canvas.rows.tokens if vectors is None else vectors)[:, :width]
        mask = None if block == network.block else masks.block_causal(positions, block)
        out = network.forward(params, inputs, positions, Prefix(canvas.cache, None), mask)
        return out.hidden, out.kv, out.counts

    needed = (cached > 0) | opens
    hidden, kv, counts = call() if opens else unless_idle(call, needed)
    counts = {name: amount * needed for name, amount in counts.items()}
    canvas = canvas.spend(counts, cached + block * opens, needed.astype(jnp.int32))
    if decoder.spec.alignment == "next":
        canvas = dataclasses.replace(canvas, previous=last_of(hidden, jnp.maximum(cached, 1)))
    return canvas, BlockRead(
        hidden=window(hidden, cached, block) if opens else hidden[:, :block],
        window=hidden,
        at=jnp.zeros_like(cached),
        kv=kv,
        reads=~canvas.rows.done & opens,
        stored=cached > 0,
        prompt=True,
    )


def read_block(
    decoder: Any, params: Any, canvas: AnyBlocks, fuse: bool, vectors: Array | None = None
) -> tuple[AnyBlocks, BlockRead]:
    """One call on what follows each row's trusted cache: its open block, or one to be stored.

    ::

        open block      | a _ c _ |              window B
        clean block     | a b c d | _ _ _ _ |    window 2B where the next block's first step is fused with the store

    The call has the wide window only where a running row needs it. The canvas is then at the open block.

    Args:
      canvas: canvas before the call, which begins at `cached`.
      fuse: read the block after a clean one along with it.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
    """
    block, at, clean = canvas.block, canvas.cached, canvas.clean
    inputs = canvas.rows.tokens if vectors is None else vectors
    follows = Following(window(inputs, at + block, block), jnp.zeros_like(at), clean) if fuse else None
    sizes = Sizes(jnp.ones_like(at), jnp.full_like(at, block), ~canvas.rows.done, bounded=decoder.bounded)
    fed = window(inputs, at, block)[:, None]
    call = forward_candidates(decoder.network, params, canvas.cache, fed, at, sizes, following=follows)
    first = call.outputs[:, 0]
    canvas = canvas.spend(call.counts, call.positions).after_block(clean, block, first[:, -1:])
    return canvas, BlockRead(
        hidden=where_rows(clean, call.following, first) if fuse else first,
        window=jnp.concatenate([first, call.following], axis=1) if fuse else first,
        at=at,
        kv=call.kv_of(decoder.network, jnp.zeros_like(at)),
        reads=~canvas.rows.done & (~clean | fuse),
        stored=clean,
    )
