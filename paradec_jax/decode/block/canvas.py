"""The state of block decoders and their network calls: read the prompt, read a block, store a block.

::

    position   0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4, limit = 10
    tokens     p p p p | a _ c _ | _ _ _ _
    cache      trusted | scratch |                cached = 4, length = 5

Blocks count from position 0, so the first one may hold the end of the prompt. The open block is read again and again
behind the trusted cache, and what is computed of it meanwhile is scratch: its keys were made while masks were there.
Once it has no mask it is read a last time, and stored. That call may read the next block along with it: the block
before is as clean there as it will ever be in the cache.
"""

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.candidates import Shape, on_smallest
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import UNLIMITED, check_range
from paradec_jax.decode.machine.network import Counts, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.masked.canvas import Canvas
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.windows import last_of, where_rows, window, write_after_read
from paradec_jax.nn import masks

AnyBlocks = TypeVar("AnyBlocks", bound="BlockCanvas")


@dataclasses.dataclass(frozen=True)
class BlockDecoder(DecoderBase):
    """What decoders of blocks share; `BlockDenoising` says what the fields mean."""

    _: dataclasses.KW_ONLY
    length: int | None = None
    fuse_store: bool = True
    fuse_prompt: bool = True
    top_p_rule: str = "keep-renormalised"
    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True

    @property
    def block(self) -> int:
        """B, a fact of the checkpoint or chosen among those that it serves."""
        return block_of(self, self.length)

    def knobs(self, knobs: Any) -> Any:
        """As of every decoder; more steps than a block has positions are refused, too."""
        knobs, most = super().knobs(knobs), self.block
        check_range(
            knobs.steps, "steps", lambda n: (n <= most) | (n == UNLIMITED), f"at most the block's {most}"
        )
        return knobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCanvas(Canvas):
    """A canvas of blocks, and the cache of those that are complete.

    Attributes:
      cache: keys and values.
      cached: trusted entries of it, those of whole blocks, [B].
      step: steps done in the open block, [B].
      previous: head input of the last stored position, [B, 1, D]; None where logits are about their own position.
    """

    cache: Any
    cached: Int[Array, "B"]
    step: Int[Array, "B"]
    previous: Float[Array, "B 1 D"] | None

    @property
    def clean(self) -> Bool[Array, "B"]:
        """Running rows whose next block to be stored has no mask left."""
        return (self.rows.length >= self.cached + self.block) & ~self.rows.done

    def stored(self: AnyBlocks, network: Any, call: "BlockCall", tokens: Int[Array, "B W"]) -> AnyBlocks:
        """The canvas after a call whose step is done: clean blocks are trusted from now on.

        Args:
          network: that called.
          call: what it returned.
          tokens: anything computed from it, see `write_after_read`.
        """
        return dataclasses.replace(
            self,
            cache=network.write(self.cache, call.kv, write_after_read(call.at, tokens)),
            cached=jnp.where(call.clean, call.start, self.cached),
            step=jnp.where(call.reads, call.step + 1, call.step),
            previous=call.previous,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCall:
    """What a call read of each row.

    Attributes:
      clean: rows of which it read a block without masks, to be stored, [B].
      reads: running rows of which it read a block with masks, [B].
      start: first position of that block (of the next one, where there is none); of clean rows the end of what is
        stored, [B].
      step: steps done in it before, [B].
      hidden: head inputs about its positions, by the checkpoint's alignment, [B, W, D].
      own: head inputs of its positions themselves, [B, W, D].
      window: those of all positions from `at` on that the call read, a block that it stores and the one after it.
      previous: as of `BlockCanvas`, after the call.
      kv: keys and values for the cache.
      at: position that they begin at, [B].
      calls, width: calls of each row, and positions that they computed for it, [B].
      counts: amounts of the network's counters.
    """

    clean: Bool[Array, "B"]
    reads: Bool[Array, "B"]
    start: Int[Array, "B"]
    step: Int[Array, "B"]
    hidden: Float[Array, "B W D"]
    own: Float[Array, "B W D"]
    window: Float[Array, "B _ D"]
    previous: Float[Array, "B 1 D"] | None
    kv: Any
    at: Int[Array, "B"]
    calls: Int[Array, "B"]
    width: Int[Array, "B"]
    counts: dict[str, Any]

    @property
    def positions(self) -> Int[Array, "B W"]:
        """Positions of the block that `hidden` is about."""
        return self.start[:, None] + jnp.arange(self.hidden.shape[1])


def block_of(decoder: Any, length: int | None = None) -> int:
    """B of a decoder's network, or another length that its checkpoint serves.

    Raises:
      ValueError: a network that does not see in blocks, or a length that it does not serve.
    """
    network = decoder.network
    if network.block is None:
        raise ValueError(
            f"{type(decoder).__name__} decodes networks of visibility 'block', but this one's is "
            f"{network.visibility!r}"
        )
    if length is not None and length not in (served := lengths_of(network)):
        raise ValueError(
            f"the checkpoint serves blocks of {', '.join(map(str, served))}, as it was trained, not of {length}"
        )
    return network.block if length is None else length


def lengths_of(network: Any) -> tuple[int, ...]:
    """Lengths of blocks that a network's checkpoint serves, ascending: its `blocks`, or its `block` alone."""
    return getattr(network, "blocks", (network.block,))


def visible(network: Any, positions: Int[Array, "B W"], block: int) -> Bool[Array, "B W W"] | None:
    """What a window's positions see of it in blocks of this length; None where that is the network's own."""
    return None if block == network.block else masks.block_causal(positions, block)


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
    decoder: Any, params: Any, canvas: BlockCanvas, given: int, opens: bool, vectors: Array | None = None
) -> BlockCall:
    """Reads the whole blocks that each row is given in one call, and commits nothing.

    Args:
      decoder, params: with a field `network`, and its parameters.
      canvas: a fresh one.
      given: positions of the request, P.
      opens: read each row's open block along with them. Otherwise a row without a whole block calls nothing.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
    """
    network, block, cached = decoder.network, canvas.block, canvas.cached
    width = max(given // block * block + block * opens, block)

    def call() -> tuple[Any, ...]:
        positions = jnp.broadcast_to(jnp.arange(width), (len(cached), width))
        inputs = (canvas.rows.tokens if vectors is None else vectors)[:, :width]
        mask = visible(network, positions, block)
        out = network.forward(params, inputs, positions, Prefix(canvas.cache, None), mask)
        return out.hidden, last_of(out.hidden, jnp.maximum(cached, 1)), out.kv, of_rows(out.counts, cached)

    def skip() -> tuple[Any, ...]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call))

    needed = (cached > 0) | opens
    hidden, last, kv, counts = call() if opens else lax.cond(jnp.any(needed), call, skip)
    opened = window(hidden, cached, block) if opens else hidden[:, :block]
    previous = last if decoder.spec.alignment == "next" else None
    return BlockCall(
        clean=jnp.zeros_like(needed),
        reads=~canvas.rows.done & opens,
        start=cached,
        step=canvas.step,
        hidden=aligned(opened, decoder.spec.alignment, previous),
        own=opened,
        window=hidden,
        previous=previous,
        kv=kv,
        at=jnp.zeros_like(cached),
        calls=needed.astype(jnp.int32),
        width=cached + block * opens,
        counts={name: amount * needed for name, amount in counts.items()},
    )


def read_block(
    decoder: Any, params: Any, canvas: BlockCanvas, rides: bool, vectors: Array | None = None
) -> BlockCall:
    """One call on what follows each row's trusted cache: its open block, or one to be stored.

    ::

        open block      | a _ c _ |              window B
        clean block     | a b c d | _ _ _ _ |    window 2B where the store rides with the next block's first step

    The call has the wide window only where a running row needs it.

    Args:
      decoder, params: with fields `network` and `bounded`, and its parameters.
      canvas: of which the call begins at `cached`.
      rides: read the block after a clean one along with it.
      vectors: what is read in place of the canvas's tokens, [B, S, D].
    """
    network, block, at, clean = decoder.network, canvas.block, canvas.cached, canvas.clean

    def call(shape: Shape) -> tuple[Any, ...]:
        width = shape[1]
        inputs = window(canvas.rows.tokens if vectors is None else vectors, at, width)
        positions = at[:, None] + jnp.arange(width)
        mask = visible(network, positions, block)
        out = network.forward(params, inputs, positions, Prefix(canvas.cache, at), mask)
        kv = out.kv if width == block else network.pick(out.kv, jnp.zeros_like(at), block)
        return out.hidden[:, :block], out.hidden[:, -block:], kv, of_rows(out.counts, at)

    widths = (block, 2 * block) if rides else (block,)
    own = jnp.where(clean & rides, 2 * block, block)
    if decoder.bounded:  # reverse mode would keep something of every shape
        first, last, kv, counts = call((1, widths[-1]))
    else:
        first, last, kv, counts = on_smallest(call, (1,), widths, jnp.ones_like(at), own, ~canvas.rows.done)
    previous = canvas.previous
    if previous is not None:
        previous = where_rows(clean, first[:, -1:], previous)
    opened = where_rows(clean, last, first)
    return BlockCall(
        clean=clean,
        reads=~canvas.rows.done & (~clean | rides),
        start=at + block * clean,
        step=jnp.where(clean, 0, canvas.step),
        hidden=aligned(opened, decoder.spec.alignment, previous),
        own=opened,
        window=jnp.concatenate([first, last], axis=1) if rides else first,
        previous=previous,
        kv=kv,
        at=at,
        calls=jnp.ones_like(at),
        width=own,
        counts=counts,
    )


def of_rows(counts: Counts, like: Array) -> dict[str, Array]:
    """Amounts of each row, where a call gives one number for all."""
    return {name: jnp.broadcast_to(jnp.asarray(n, jnp.int32), like.shape) for name, n in counts.items()}
