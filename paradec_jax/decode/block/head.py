"""A residual head beside the network: its cache, its calls, and the knobs of all who have one.

::

    position      0 1 2 3 | 4 5 6 7 | 8 9 . .        B = 4
    tokens        p p p p | a b c d | _ e _ _        the block at 4 has just been completed, e was revealed
    network       trusted | stored with the first call on the block at 8
    head          trusted | stored with the head's first call on it: one window of 2B for both

The head reads tokens as they are *after* a reveal and head inputs of the network *before* it; what it returns is
added to those inputs. Its own cache holds whole blocks: their tokens, and what the network said of them complete.
With logits about the next position, a block's first one comes from the block before it, which no reveal changes.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.canvas import BlockCall, BlockCanvas, fresh, of_rows
from paradec_jax.decode.block.rules import Choice, DenoisingKnobs
from paradec_jax.decode.machine.candidates import Shape, on_smallest
from paradec_jax.decode.machine.knobs import UNLIMITED, check_range, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.randomness import Purpose, purpose_keys
from paradec_jax.decode.rules.windows import window

ZERO = "zero"
AnyHead = TypeVar("AnyHead", bound="HeadCanvas")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadKnobs(DenoisingKnobs):
    """Denoising, and when the head is asked.

    Attributes:
      head_threshold: confidence that each position of a head's step must reach, after correction; a step that fails
        reveals and drafts nothing, and no other one follows it. None asks for none.
      enough: the head is not asked where the network's own choice revealed so many positions; None asks in any case.
    """

    head_threshold: Float[Array, ""] | float | None = knob(None, unset=0.0)
    enough: Int[Array, ""] | int | None = knob(None, unset=UNLIMITED)

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        DenoisingKnobs.check(self)
        check_range(self.head_threshold, "head_threshold", lambda x: x >= 0, "at least 0")
        check_range(self.enough, "enough", lambda x: x >= 1, "at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadCanvas(BlockCanvas):
    """A canvas of blocks, and the head's cache of those that are complete.

    Attributes:
      head_cache: the head's keys and values, trusted as far as the network's; None where it has none.
    """

    head_cache: Any


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


def fresh_with_head(decoder: Any, request: Request, *, context: bool = True, overrun: int = 0) -> HeadCanvas:
    """The canvas before any call, and an empty cache of the head.

    Args:
      decoder: with fields `network` and `head`.
      request: the request.
      context: whether the head sees the blocks before its own; without it, it has no cache.
      overrun: see `canvas.fresh`.
    """
    canvas, head = fresh(decoder, request, overrun), head_of(decoder)
    cache = None
    if context and head is not None:
        keys = purpose_keys(request.keys, Purpose.STATE)
        cache = head.init_cache(keys, canvas.rows.tokens.shape[1])
    return HeadCanvas(**vars(canvas), head_cache=cache)


def light(state: AnyHead) -> AnyHead:
    """The canvas without its caches, for loops that do not change them."""
    return dataclasses.replace(state, cache=None, head_cache=None)


def first_call(
    decoder: Any, params: Any, state: AnyHead, call: BlockCall, wants: Bool[Array, "B"], prompt: bool
) -> tuple[AnyHead, Float[Array, "B W D"]]:
    """The head's call that follows one of the network: stores what that one stored, and reads each row's open block.

    It is skipped where no row has either to do.

    Args:
      decoder, params: with fields `network` and `head`, and the parameters of both by their names.
      state: the canvas after the network's reveals.
      call: what the network's call read.
      wants: rows whose open block is to be corrected.
      prompt: whether it read the prompt.

    Returns:
      The canvas, its counts and the head's cache renewed; and the residual of the open blocks.
    """
    head, block, cache = head_of(decoder), state.block, state.head_cache
    if head is None:
        return state, jnp.zeros_like(call.own)
    if cache is None:
        residual, state = next_call(decoder, params, state, state, call.own, call.start, wants)
        return state, residual
    stores = (call.at < state.cached if prompt else call.clean) & ~state.rows.done
    needed, read = stores | wants, call.window.shape[1]
    kept = read if prompt else block
    widths = (read,) if prompt else tuple({block, read})
    own = jnp.where(stores & wants, read, block)
    vectors = decoder.network.embedding(params["network"])

    def ask(shape: Shape) -> tuple[Any, ...]:
        width = shape[1]
        positions = call.at[:, None] + jnp.arange(width)
        out = head.forward(
            params["head"],
            vectors[window(state.rows.tokens, call.at, width)],
            positions,
            Prefix(cache, None if prompt else call.at),
            hidden=call.window[:, :width],
        )
        kv = out.kv if width == kept else head.pick(out.kv, jnp.zeros_like(call.at), kept)
        return window(out.hidden, call.start - call.at, block), kv, of_rows(out.counts, call.at)

    if decoder.bounded:
        residual, kv, counts = ask((1, read))
    else:
        smallest = functools.partial(on_smallest, ask, (1,), widths, jnp.ones_like(call.at), own, needed)
        residual, kv, counts = _unless_idle(smallest, functools.partial(ask, (1, read)), needed)
    state = state.spend({name: amount * needed for name, amount in counts.items()}, 0, 0)
    state = dataclasses.replace(state, head_cache=head.write(cache, kv, call.at))
    # Zero for other rows, so that nothing of theirs depends on whether others needed the call.
    return state, jnp.where(wants[:, None, None], residual, 0)


def next_call(
    decoder: Any,
    params: Any,
    state: AnyHead,
    caches: HeadCanvas,
    hidden: Float[Array, "B W D"],
    at: Int[Array, "B"],
    wants: Bool[Array, "B"],
    tokens: Int[Array, "B W"] | None = None,
) -> tuple[Float[Array, "B W D"], AnyHead]:
    """A further call of the head on each row's open block; skipped where no row wants it, and stored nowhere.

    Args:
      decoder, params, wants: as in `first_call`.
      state: the canvas as it stands.
      caches: a canvas with the head's cache.
      hidden: head inputs of the block so far, before alignment.
      at: the block's first position.
      tokens: what stands in the block where it is not the canvas, [B, W].

    Returns:
      The residual, and the canvas with its counts renewed.
    """
    head, cache = head_of(decoder), caches.head_cache
    if head is None:
        return jnp.zeros_like(hidden), state
    tokens = window(state.rows.tokens, at, state.block) if tokens is None else tokens

    def ask() -> tuple[Any, ...]:
        vectors = decoder.network.embedding(params["network"])[tokens]
        positions = at[:, None] + jnp.arange(state.block)
        prefix = None if cache is None else Prefix(cache, at)
        out = head.forward(params["head"], vectors, positions, prefix, hidden=hidden)
        return out.hidden, of_rows(out.counts, at)

    residual, counts = ask() if decoder.bounded else _unless_idle(ask, ask, wants)
    state = state.spend({name: amount * wants for name, amount in counts.items()}, 0, 0)
    return jnp.where(wants[:, None, None], residual, 0), state


def _unless_idle(call: Any, like: Any, needed: Bool[Array, "B"]) -> Any:
    """What a call returns, or zeros where no row needs it."""

    def skip() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(like))

    return lax.cond(jnp.any(needed), call, skip)


def sure(choice: Choice, knobs: HeadKnobs) -> Bool[Array, "B"]:
    """Rows in which every position that a head's step chose is as sure as `head_threshold` asks."""
    least = jnp.min(jnp.where(choice.where, choice.scores, jnp.inf), axis=1)
    return least >= (0.0 if knobs.head_threshold is None else knobs.head_threshold)


def few(revealed: Bool[Array, "B W"], knobs: HeadKnobs) -> Bool[Array, "B"]:
    """Rows in which the network revealed too little to do without the head."""
    return jnp.sum(revealed, axis=1) < (UNLIMITED if knobs.enough is None else knobs.enough)
