"""A residual head beside the network: its cache, its calls, and the knobs of all decoders that have
one.

::

    position      0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4
    tokens        p p p p | a b c d | _ e _ _        the block at 4 is complete, e was revealed
    network       trusted | stored with the first call on the block at 8
    head          trusted | stored with the head's first call on it: one window of 2B for both

The head reads tokens as they are *after* a reveal and hidden states of the network *before* it;
what it returns is added to those states. Its own cache holds whole blocks, read when they were
complete: their tokens and hidden states. With logits about the next position, a block's first state
comes from the block before it, which no reveal changes.
"""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.reading import fresh
from paradec_jax.decode.canvas import BlockCanvas, BlockDecoder, BlockRead, Choice, DenoisingKnobs
from paradec_jax.decode.machine import (
    COUNT,
    NOT_NEGATIVE,
    UNLIMITED,
    CachedNetwork,
    Number,
    Prefix,
    Request,
    Whole,
    knob,
    on_smallest,
)
from paradec_jax.decode.rules import Purpose, purpose_keys, window
from paradec_jax.records import choices, pytree

ZERO = "zero"
AnyHead = TypeVar("AnyHead", bound="HeadCanvas")


@pytree
class HeadKnobs(DenoisingKnobs):
    """Denoising, and when the head is asked.

    Attributes:
      head_threshold: confidence that each position of a head's step must reach, after correction; a
        step that fails reveals and drafts nothing, and no other one follows it. None asks for none.
      enough: number of positions that the network's own choice must reveal to leave out the head;
        None never does.
    """

    head_threshold: Number | None = knob(None, NOT_NEGATIVE, unset=0.0)
    enough: Whole | None = knob(None, COUNT, unset=UNLIMITED)

    def asks(self, revealed: Bool[Array, "B W"]) -> Bool[Array, "B"]:
        """Rows in which the network revealed too little to do without the head."""
        return jnp.sum(revealed, axis=1) < (UNLIMITED if self.enough is None else self.enough)

    def sure(self, choice: Choice) -> Choice:
        """A head's choice, in rows in which every position of it reaches `head_threshold`."""
        least = jnp.min(jnp.where(choice.where, choice.scores, jnp.inf), axis=1)
        return choice.only(least >= (0.0 if self.head_threshold is None else self.head_threshold))


@pytree
class HeadCanvas(BlockCanvas):
    """A canvas of blocks, and the head's cache of those that are complete.

    Attributes:
      head_cache: keys and values of the head, trusted as far as the network's; None where it has
        none.
    """

    head_cache: Any

    @property
    def text(self) -> Int[Array, "B W"]:
        """What stands in each row's open block."""
        return window(self.rows.tokens, self.cached, self.block)


@choices
class HeadDecoder(BlockDecoder):
    """A block decoder with a residual head, "zero" where none runs; an abstract base."""

    head: CachedNetwork | str | None = None
    further_networks = ("head",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.head)


def check_head(head: Any) -> None:
    """Refuses a word that is none. Raises ValueError."""
    if isinstance(head, str) and head != ZERO:
        raise ValueError(f"head must be a residual head's network, or {ZERO!r}, not {head!r}")


def head_of(decoder: Any) -> Any:
    """The head's network; None where nothing runs and the residual is zero.

    Raises:
      ValueError: a head of another block length.
    """
    block, head = decoder.block, decoder.head
    if head == ZERO:
        return None
    if head.block != block:
        raise ValueError(
            f"the head corrects blocks of {head.block}, not of {block}: it is another network's or "
            "another length's"
        )
    return head


def fresh_with_head(decoder: Any, request: Request, overrun: int = 0) -> HeadCanvas:
    """The canvas before any call, and an empty cache of the head; `overrun` as of `fresh`."""
    canvas, head, cache = fresh(decoder, request, overrun), head_of(decoder), None
    if head is not None:
        keys = purpose_keys(request.keys, Purpose.STATE)
        cache = head.init_cache(keys, canvas.rows.tokens.shape[1])
    return HeadCanvas(**vars(canvas), head_cache=cache)


def ask_head(
    decoder: Any,
    params: Any,
    state: AnyHead,
    call: BlockRead,
    wants: Bool[Array, "B"],
    tokens: Int[Array, "B W"] | None = None,
) -> tuple[Float[Array, "B W D"], AnyHead]:
    """The residual of each row's open block, zero where it is not wanted, and the canvas after the
    head's call, which is skipped where no row needs it.

    Args:
      decoder, params: with fields `network` and `head`, and the parameters of both by their names.
      state: the canvas as it stands.
      call: what the network read; its `hidden` with all residuals so far.
      wants: rows whose open block is to be corrected.
      tokens: what stands in the block. None is what stands on the canvas when the head is asked for
        the first time after `call`: what that one stored is then read and stored as well.
    """
    head, cache, block = head_of(decoder), state.head_cache, state.block
    if head is None:
        return jnp.zeros_like(call.hidden), state
    at, hidden, prompt, stores = state.cached, call.hidden, False, jnp.zeros_like(wants)
    if first := tokens is None:
        at, hidden, prompt = call.at, call.window, call.prompt
        stores = call.stored & ~state.rows.done & (cache is not None)
        tokens = window(state.rows.tokens, at, hidden.shape[1])
    most, needed = hidden.shape[1], stores | wants
    least = most if prompt else block
    vectors = decoder.network.embedding(params["network"])

    def ask(width: int) -> tuple[Any, ...]:
        prefix = None if cache is None else Prefix(cache, None if prompt else at)
        read, positions = vectors[tokens[:, :width]], at[:, None] + jnp.arange(width)
        out = head.forward(params["head"], read, positions, prefix, hidden=hidden[:, :width])
        kv = out.kv if width == least else head.pick(out.kv, jnp.zeros_like(at), least)
        return window(out.hidden, state.cached - at, block), kv if first else None, out.counts

    # What is stored comes first: a row that only stores reads no more.
    widths, asked = sorted({least, most}), jnp.where(stores & wants, most, least)
    fits = asked[:, None] <= jnp.asarray(widths)
    residual, kv, counts = on_smallest(ask, widths, fits, needed, decoder.bounded)
    state = state.spend({name: amount * needed for name, amount in counts.items()}, 0, 0)
    if first and cache is not None:
        state = dataclasses.replace(state, head_cache=head.write(cache, kv, at))
    # Zero for other rows, so that nothing of theirs depends on whether others needed the call.
    return jnp.where(wants[:, None, None], residual, 0), state
