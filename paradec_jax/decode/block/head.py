"""A residual head beside the network: its cache, its calls, and the knobs of all decoders that have
one.

::

    position      0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4
    tokens        p p p p | a b c d | _ e _ _        the block at 4 has just been completed, e was revealed
    network       trusted | stored with the first call on the block at 8
    head          trusted | stored with the head's first call on it: one window of 2B for both

The head reads tokens as they are *after* a reveal and hidden states of the network *before* it;
what it returns is added to those states. Its own cache holds whole blocks, read when they were
complete: their tokens and hidden states. With logits about the next position, a block's first state
  comes from the block before it, which no reveal changes.
"""

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.reading import fresh
from paradec_jax.decode.canvas.blocks import BlockCanvas, BlockRead
from paradec_jax.decode.canvas.canvas import Choice
from paradec_jax.decode.canvas.choose import BlockDecoder, DenoisingKnobs
from paradec_jax.decode.machine.knobs import COUNT, NOT_NEGATIVE, UNLIMITED, knob
from paradec_jax.decode.machine.network import CachedNetwork, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.shapes import on_smallest, unless_idle
from paradec_jax.decode.rules.randomness import Purpose, purpose_keys
from paradec_jax.decode.rules.windows import window

ZERO = "zero"
AnyHead = TypeVar("AnyHead", bound="HeadCanvas")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadKnobs(DenoisingKnobs):
    """Denoising, and when the head is asked.

    Attributes:
      head_threshold: confidence that each position of a head's step must reach, after correction; a
        step that fails reveals and drafts nothing, and no other one follows it. None asks for none.
      enough: number of positions that the network's own choice must reveal to leave out the head;
        None never does.
    """

    head_threshold: Float[Array, ""] | float | None = knob(None, NOT_NEGATIVE, unset=0.0)
    enough: Int[Array, ""] | int | None = knob(None, COUNT, unset=UNLIMITED)

    def asks(self, revealed: Bool[Array, "B W"]) -> Bool[Array, "B"]:
        """Rows in which the network revealed too little to do without the head."""
        return jnp.sum(revealed, axis=1) < (UNLIMITED if self.enough is None else self.enough)

    def sure(self, choice: Choice) -> Choice:
        """A head's choice, in rows in which every position of it reaches `head_threshold`."""
        least = jnp.min(jnp.where(choice.where, choice.scores, jnp.inf), axis=1)
        return choice.only(least >= (0.0 if self.head_threshold is None else self.head_threshold))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadCanvas(BlockCanvas):
    """A canvas of blocks, and the head's cache of those that are complete.

    Attributes:
      head_cache: keys and values of the head, trusted as far as the network's; None where it has
        none.
    """

    head_cache: Any


@dataclasses.dataclass(frozen=True)
class HeadDecoder(BlockDecoder):
    """A block decoder with a residual head, "zero" where none runs; an abstract base."""

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

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
            f"the head corrects blocks of {head.block}, not of {block}: it is another network's or another length's"
        )
    return head


def fresh_with_head(decoder: Any, request: Request, overrun: int = 0) -> HeadCanvas:
    """The canvas before any call, and an empty cache of the head; `overrun` as for `reading.fresh`."""
    canvas, head, cache = fresh(decoder, request, overrun), head_of(decoder), None
    if head is not None:
        keys = purpose_keys(request.keys, Purpose.STATE)
        cache = head.init_cache(keys, canvas.rows.tokens.shape[1])
    return HeadCanvas(**vars(canvas), head_cache=cache)


def ask_head(
    decoder: Any,
    params: Any,
    state: AnyHead,
    hidden: Float[Array, "B W D"],
    wants: Bool[Array, "B"],
    tokens: Int[Array, "B W"] | None = None,
    call: BlockRead | None = None,
) -> tuple[Float[Array, "B W D"], AnyHead]:
    """The residual of each row's open block, zero where it is not wanted, and the canvas after the
    head's call.

    The first call after one of the network stores what that one stored along with it. A call that
    no row needs is skipped.

    Args:
      decoder, params: with fields `network` and `head`, and the parameters of both by their names.
      state: the canvas as it stands.
      hidden: hidden states of the open block so far, before alignment.
      wants: rows whose open block is to be corrected.
      tokens: what stands in the block, where it is not what stands on the canvas.
      call: what the network read, in the head's first call after it.
    """
    head, cache, block, at = head_of(decoder), state.head_cache, state.block, state.cached
    if head is None:
        return jnp.zeros_like(hidden), state
    stores, prompt = jnp.zeros_like(wants), False
    if storing := call is not None and cache is not None:
        at, hidden, prompt, tokens = call.at, call.window, call.prompt, None
        stores = call.stored & ~state.rows.done
    needed, widest = stores | wants, hidden.shape[1]
    kept = widest if prompt else block
    widths = sorted({kept, widest})
    vectors = decoder.network.embedding(params["network"])

    def ask(width: int) -> tuple[Any, ...]:
        ids = window(state.rows.tokens, at, width) if tokens is None else tokens
        prefix = None if cache is None else Prefix(cache, None if prompt else at)
        positions = at[:, None] + jnp.arange(width)
        out = head.forward(
            params["head"], vectors[ids], positions, prefix, hidden=hidden[:, :width]
        )
        kv = None
        if storing:
            kv = out.kv if width == kept else head.pick(out.kv, jnp.zeros_like(at), kept)
        return window(out.hidden, state.cached - at, block), kv, out.counts

    widest_call = functools.partial(ask, widest)
    if decoder.bounded:  # reverse mode would keep something of every shape
        residual, kv, counts = widest_call()
    else:
        computed = jnp.where(stores & wants, widest, kept)
        fits = computed[:, None] <= jnp.asarray(widths)
        smallest = functools.partial(on_smallest, ask, widths, fits)
        residual, kv, counts = unless_idle(smallest, needed, widest_call)
    state = state.spend({name: amount * needed for name, amount in counts.items()}, 0, 0)
    if storing:
        state = dataclasses.replace(state, head_cache=head.write(cache, kv, at))
    # Zero for other rows, so that nothing of theirs depends on whether others needed the call.
    return jnp.where(wants[:, None, None], residual, 0), state
