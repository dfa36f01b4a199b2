"""Block denoising in which each block's length is chosen by entropy, among those that the
checkpoint serves.

::

    lengths 2, 4, 8     position   0 1 2 3 4 5 6 7 | 8 9 . .
    first read          row 0      p p p _ _ _ _ _           as one block of 8: entropies .1 .1 .2 2 3
                                   p p p a|                  the mean is low up to 4, so the block ends there
    then                           p p p a|_ _ _ _|         the next is read as a block of 4, which may begin here

A block of length L begins at multiples of L, as in training, so each length must divide the next
one. A block is read first as the longest that may begin at its place. With H the entropies of its
masked positions, it becomes the longest one, of those that hold a mask, that has::

    mean of H over the masked positions of the block <= length_entropy

and the shortest of them where none has. That call is the block's first step as well: what it read
after the block's end were masks. Rows choose on their own; the window holds the longest block, and
a row sees of it what is its own.

This decoder is of no paper. It shows that one can stand outside of the package, under the same
laws.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.reading import fresh, read_prompt
from paradec_jax.decode.canvas.blocks import BlockCanvas, BlockRead
from paradec_jax.decode.canvas.choose import RULES, DenoisingKnobs, RuledDecoder, block_of
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.shapes import on_smallest
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.windows import pad_slots, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticKnobs(DenoisingKnobs):
    """Denoising, and how long blocks are.

    Attributes:
      length_entropy: nats that the masked positions of a block may have in the mean where it could
        be shorter; None asks nothing, so that blocks are as long as they may be.
    """

    length_entropy: Float[Array, ""] | float | None = knob(None, NOT_NEGATIVE, unset=np.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticCanvas(BlockCanvas):
    """A canvas of blocks of several lengths; `block` is the longest.

    Attributes:
      span: length of each row's open block; before its first step the longest that may begin there,
        [B].
    """

    span: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticDenoised(Denoised):
    """What a call did to a block of each row, and the block's length, [B]."""

    span: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ElasticDenoising(RuledDecoder):
    """`BlockDenoising`, fused, whose blocks differ in length.

    With one length it is `BlockDenoising(length=..)`, token for token and call for call. So it is
    with several, at the longest, where `length_entropy` asks nothing.

    A row of n new positions ends within 1 + 2 (n + B) network calls, B the longest length.

    Attributes:
      lengths: block lengths that it chooses among, ascending, each a multiple of the one before;
        all that the checkpoint serves when None.
      rule, top_p_rule: as in `BlockDenoising`.
    """

    _: dataclasses.KW_ONLY
    lengths: tuple[int, ...] | None = None
    rule: str = "dynamic"
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = ElasticKnobs

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)
        if self.lengths is not None:
            check_lengths(self.lengths)

    @property
    def choices(self) -> tuple[int, ...]:
        """The lengths, facts of the checkpoint."""
        block_of(self)
        found: Any = self.lengths or getattr(self.network, "blocks", (self.network.block,))
        check_lengths(found)
        return tuple(block_of(self, length) for length in found)

    @property
    def block(self) -> int:
        """W, the longest length."""
        return self.choices[-1]

    def init(self, params: Any, request: Request, knobs: ElasticKnobs) -> ElasticCanvas:
        """Reads the prompts' whole blocks of the longest length, and does the first step along with
        them.
        """
        canvas = fresh(self, request)
        state = ElasticCanvas(**vars(canvas), span=jnp.full_like(canvas.cached, self.block))
        state, call = read_prompt(self, params, state, request, opens=True)
        return self._advance(params, state, call, knobs)[0]

    def step(
        self, params: Any, state: ElasticCanvas, knobs: ElasticKnobs
    ) -> tuple[ElasticCanvas, ElasticDenoised]:
        """One call: a step in each row's open block, and the store of the one before where it is
        clean.
        """
        state, call = self._read(params, state)
        return self._advance(params, state, call, knobs)

    def _read(self, params: Any, state: ElasticCanvas) -> tuple[ElasticCanvas, BlockRead]:
        """One call on each row's clean block and the open one after it, or on its open block.

        ::

            open     | a _ c _ |                       `span` positions
            clean    | a b c d | _ _ _ _ _ _ _ _ |     those of the clean block, and `span`
        """
        network, at, longest = self.network, state.cached, self.block
        clean = (state.rows.length >= at + state.span) & ~state.rows.done
        first = jnp.where(clean, state.span, 0)
        span = jnp.where(clean, longest_at(at + first, self.choices), state.span)
        end = first + span

        def call(width: int) -> tuple[Any, ...]:
            offset = jnp.arange(width)
            # A clean block sees itself, what follows both.
            ends = jnp.where(offset < first[:, None], first[:, None], end[:, None])
            mask = offset < ends[:, :, None]
            tokens, positions = window(state.rows.tokens, at, width), at[:, None] + offset
            out = network.forward(params, tokens, positions, Prefix(state.cache, at), mask)
            wide = width > longest
            kv = (
                network.pick(out.kv, jnp.zeros_like(at), longest)
                if wide
                else network.widen(out.kv, longest)
            )
            return pad_slots(out.hidden, 2 * longest), kv, out.counts

        widths = (*self.choices, 2 * longest)
        fits = (end[:, None] <= jnp.asarray(widths)) | state.rows.done[:, None]
        hidden, kv, counts = on_smallest(call, widths, fits, bounded=self.bounded)
        own = (jnp.arange(longest) < span[:, None]) & ~state.rows.done[:, None]
        opened = window(hidden, first, longest)
        state = dataclasses.replace(state.spend(counts, end), span=span)
        state = state.after_block(clean, first, window(hidden, jnp.maximum(first - 1, 0), 1))
        return state, BlockRead(
            hidden=jnp.where(own[..., None], opened, 0),  # whatever the others' window held
            window=hidden,
            at=at,
            kv=kv,
            reads=~state.rows.done,
            stored=clean,
        )

    def _advance(
        self, params: Any, state: ElasticCanvas, call: BlockRead, knobs: ElasticKnobs
    ) -> tuple[ElasticCanvas, ElasticDenoised]:
        """What follows a call: the block's length, the rule's choice, the store, the reveal."""
        logits, offset = (
            self.network.logits(params, state.aligned(call.hidden)),
            jnp.arange(self.block),
        )
        masked = state.masked(call.reads) & (offset < state.span[:, None])
        # The length is chosen in a block's first step.
        entropies = score.entropy(self.shaped(logits, knobs))
        chosen = choose_length(
            entropies, masked, state.cached, state.span, self.choices, knobs.length_entropy
        )
        span = jnp.where((state.step == 0) & call.reads, chosen, state.span)
        masked &= offset < span[:, None]
        choice = self.choose(
            logits, masked, state.cached, state.step, state.rows, knobs, block=span
        )
        info = ElasticDenoised(**vars(Denoised.of(state, call, choice)), span=span)
        state = dataclasses.replace(state.store(self.network, call, choice.tokens), span=span)
        return state.with_choice(choice), info


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Refuses lengths whose blocks would not lie within one another. Raises ValueError."""
    fits = all(b > a and b % a == 0 for a, b in itertools.pairwise(lengths))
    if not lengths or min(lengths) < 1 or not fits:
        raise ValueError(
            f"lengths must be at least 1, each a multiple of the one before, not {lengths}"
        )


def longest_at(start: Int[Array, "B"], lengths: tuple[int, ...]) -> Int[Array, "B"]:
    """The longest block that may begin at each of these positions, which are multiples of the
    shortest.
    """
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
        mean = jnp.sum(jnp.where(longer, entropies, 0.0), axis=1) / jnp.maximum(
            jnp.sum(longer, axis=1), 1
        )
        uncertain = mean > (jnp.inf if bound is None else bound)
        chosen = jnp.where(holds & uncertain & (length < chosen), length, chosen)
    return chosen
