"""Block denoising in which each block's length is chosen by entropy, among those that the checkpoint serves.

::

    lengths 2, 4, 8     position   0 1 2 3 4 5 6 7 | 8 9 . .
    first read          row 0      p p p _ _ _ _ _           as one block of 8: entropies .1 .1 .2 2 3
                                   p p p a|                  the mean is low up to 4, so the block ends there
    then                           p p p a|_ _ _ _|         the next is read as a block of 4, which may begin here

A block of length L begins at multiples of L, as in training, so each length must divide the next one. A block is read
first as the longest that may begin at its place. With H the entropies of its masked positions, it becomes the longest
one, of those that hold a mask, that has::

    mean of H over the masked positions of the block <= length_entropy

and the shortest of them where none has. That call is the block's first step as well: what it read after the block's
end were masks. Rows choose on their own; the window holds the longest block, and a row sees of it what is its own.

This decoder is of no paper. It shows that one can stand outside of the package, under the same laws.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.canvas import (
    BlockCall,
    BlockCanvas,
    block_of,
    fresh,
    lengths_of,
    of_rows,
    read_prompt,
)
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.rules import RULES, DenoisingKnobs, choose
from paradec_jax.decode.machine.candidates import Shape, on_smallest
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import check_range, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.sampling import tempered
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import pad_slots, where_rows, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticKnobs(DenoisingKnobs):
    """Denoising, and how long blocks are.

    Attributes:
      length_entropy: nats that the masked positions of a block may have in the mean where it could be shorter; None
        asks nothing, so that blocks are as long as they may be.
    """

    length_entropy: Float[Array, ""] | float | None = knob(None, unset=np.inf)

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        super().check()
        check_range(self.length_entropy, "length_entropy", lambda x: x >= 0, "at least 0")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticCanvas(BlockCanvas):
    """A canvas of blocks of several lengths; `block` is the longest.

    Attributes:
      span: length of each row's open block; before its first step the longest that may begin there, [B].
    """

    span: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticDenoised(Denoised):
    """What a call did to a block of each row, and the block's length, [B]."""

    span: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ElasticDenoising(DecoderBase):
    """`BlockDenoising`, fused, whose blocks differ in length.

    With one length it is `BlockDenoising(length=..)`, token for token and call for call. So it is with several, at
    the longest, where `length_entropy` asks nothing.

    A row of n new positions ends within 1 + 2 (n + B) network calls, B the longest length.

    Attributes:
      lengths: those that it chooses among, ascending, each a multiple of the one before; all that the checkpoint
        serves when None.
      rule, top_p_rule: as in `BlockDenoising`.
    """

    _: dataclasses.KW_ONLY
    lengths: tuple[int, ...] | None = None
    rule: str = "dynamic"
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = ElasticKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)
        if self.lengths is not None:
            check_lengths(self.lengths)

    @property
    def choices(self) -> tuple[int, ...]:
        """The lengths, facts of the checkpoint."""
        block_of(self)
        found = lengths_of(self.network) if self.lengths is None else self.lengths
        check_lengths(found)
        return tuple(block_of(self, length) for length in found)

    @property
    def block(self) -> int:
        """W, the longest length."""
        return self.choices[-1]

    def init(self, params: Any, request: Request, knobs: ElasticKnobs) -> ElasticCanvas:
        """Reads the prompts' whole blocks of the longest length, and does the first step along with them."""
        canvas = fresh(self, request)
        state = ElasticCanvas(**vars(canvas), span=jnp.full_like(canvas.cached, self.block))
        call = read_prompt(self, params, state, request.tokens.shape[1], True)
        return self._advance(params, state, call, state.span, knobs)[0]

    def step(
        self, params: Any, state: ElasticCanvas, knobs: ElasticKnobs
    ) -> tuple[ElasticCanvas, ElasticDenoised]:
        """One call: a step in each row's open block, and the store of the one before where it is clean."""
        clean = (state.rows.length >= state.cached + state.span) & ~state.rows.done
        start = state.cached + jnp.where(clean, state.span, 0)
        span = jnp.where(clean, longest_at(start, self.choices), state.span)
        return self._advance(params, state, self._read(params, state, clean, span), span, knobs)

    def _read(
        self, params: Any, state: ElasticCanvas, clean: Bool[Array, "B"], span: Int[Array, "B"]
    ) -> BlockCall:
        """One call on each row's clean block and the open one after it, or on its open block.

        ::

            open     | a _ c _ |                       `span` positions
            clean    | a b c d | _ _ _ _ _ _ _ _ |     those of the clean block, and `span`
        """
        network, at, longest = self.network, state.cached, self.block
        first = jnp.where(clean, state.span, 0)
        end = first + span

        def call(shape: Shape) -> tuple[Any, ...]:
            width = shape[1]
            offset = jnp.arange(width)
            # A clean block sees itself, what follows both.
            ends = jnp.where(offset < first[:, None], first[:, None], end[:, None])
            mask = offset < ends[:, :, None]
            tokens, positions = window(state.rows.tokens, at, width), at[:, None] + offset
            out = network.forward(params, tokens, positions, Prefix(state.cache, at), mask)
            wide = width > longest
            kv = network.pick(out.kv, jnp.zeros_like(at), longest) if wide else network.widen(out.kv, longest)
            return pad_slots(out.hidden, 2 * longest), kv, of_rows(out.counts, at)

        widths = (*self.choices, 2 * longest)
        if self.bounded:  # reverse mode would keep something of every shape
            hidden, kv, counts = call((1, widths[-1]))
        else:
            hidden, kv, counts = on_smallest(call, (1,), widths, jnp.ones_like(at), end, ~state.rows.done)
        previous = state.previous
        if previous is not None:
            previous = where_rows(clean, window(hidden, jnp.maximum(first - 1, 0), 1), previous)
        own = (jnp.arange(longest) < span[:, None]) & ~state.rows.done[:, None]
        opened = jnp.where(
            own[..., None], window(hidden, first, longest), 0
        )  # whatever the others' window held
        return BlockCall(
            clean=clean,
            reads=~state.rows.done,
            start=at + first,
            step=jnp.where(clean, 0, state.step),
            hidden=aligned(opened, self.spec.alignment, previous),
            own=opened,
            window=hidden,
            previous=previous,
            kv=kv,
            at=at,
            calls=jnp.ones_like(at),
            width=end,
            counts=counts,
        )

    def _advance(
        self, params: Any, state: ElasticCanvas, call: BlockCall, span: Int[Array, "B"], knobs: ElasticKnobs
    ) -> tuple[ElasticCanvas, ElasticDenoised]:
        """What follows a call: the block's length, the rule's choice, the store, the reveal."""
        state = state.spend(call.counts, call.width, call.calls)
        logits, offset = self.network.logits(params, call.hidden), jnp.arange(self.block)
        masked = window(state.open, call.start, self.block) & call.reads[:, None]
        masked &= offset < span[:, None]
        entropies = score.entropy(tempered(logits, knobs.temperature))
        chosen = choose_length(entropies, masked, call.start, span, self.choices, knobs.length_entropy)
        span = jnp.where((call.step == 0) & call.reads, chosen, span)
        masked &= offset < span[:, None]
        choice = choose(
            self, self.rule, logits, masked, call.positions, call.step, state.rows, knobs, block=span
        )
        state = dataclasses.replace(state.stored(self.network, call, choice.tokens), span=span)
        log_probs = self.scores(without_mask(logits, self.mask), choice.tokens)
        state = state.reveal(choice.tokens, choice.where, call.start, log_probs)
        return state, ElasticDenoised.of(call, choice, span=span)


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Refuses lengths whose blocks would not lie within one another. Raises ValueError."""
    fits = all(b > a and b % a == 0 for a, b in itertools.pairwise(lengths))
    if not lengths or min(lengths) < 1 or not fits:
        raise ValueError(f"lengths must be at least 1, each a multiple of the one before, not {lengths}")


def longest_at(start: Int[Array, "B"], lengths: tuple[int, ...]) -> Int[Array, "B"]:
    """The longest block that may begin at each of these positions, which are multiples of the shortest."""
    found = jnp.full_like(start, lengths[0])
    for length in lengths[1:]:
        found = jnp.where(start % length == 0, length, found)
    return found


def choose_length(
    entropies: Float[Array, "B W"],
    masked: Bool[Array, "B W"],
    start: Int[Array, "B"],
    most: Int[Array, "B"],
    lengths: tuple[int, ...],
    bound: Float[Array, ""] | float | None,
) -> Int[Array, "B"]:
    """The length of each row's block, as the head of this file says.

    Args:
      entropies, masked: of the window's positions.
      start: where the block begins.
      most: the longest that it may be; it is that where it holds no mask at all.
      lengths: to choose among.
      bound: nats; None asks nothing.
    """
    chosen = most
    for length in reversed(lengths):  # a shorter one takes the place of one that is too uncertain
        within = masked & (jnp.arange(masked.shape[1]) < length)
        holds = jnp.any(within, axis=1) & (length <= most) & (start % length == 0)
        longer = masked & (jnp.arange(masked.shape[1]) < chosen[:, None])
        mean = jnp.sum(jnp.where(longer, entropies, 0.0), axis=1) / jnp.maximum(jnp.sum(longer, axis=1), 1)
        uncertain = mean > (jnp.inf if bound is None else bound)
        chosen = jnp.where(holds & uncertain & (length < chosen), length, chosen)
    return chosen
