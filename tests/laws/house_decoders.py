"""Small decoders that show what the canvas has room for: they run through every driver and law.

`AnyOrder` reveals a canvas from nothing or around given tokens, `DualCache` sees its cache through
a mask with the open block cut out, `Revoking` hides what it has shown, `OpenBlocks` works on
several blocks in one call.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.reading import read_prompt
from paradec_jax.decode.canvas.blocks import BlockCanvas, BlockRead
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.canvas.choose import DenoisingKnobs, RuledDecoder
from paradec_jax.decode.canvas.spans import read_span
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, SamplingKnobs, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.tree import Windows, forward_tree
from paradec_jax.decode.rules import reveal, score, select
from paradec_jax.decode.rules.windows import pad_slots, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RevealKnobs(SamplingKnobs):
    """Sampling, and `threshold`, the confidence from which a position is revealed."""

    threshold: Float[Array, ""] | float = knob(0.9, NOT_NEGATIVE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Revealed:
    """What recorders read of a call: confidences of a window at `at`, and what was revealed of it."""

    at: Int[Array, "B"]
    scores: Float[Array, "B W"]
    where: Bool[Array, "B W"]


@dataclasses.dataclass(frozen=True)
class AnyOrder(DecoderBase):
    """Reads the whole canvas in every call and reveals its surest positions, at least one of each
    row.
    """

    Knobs: ClassVar[type] = RevealKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False

    def init(self, params: Any, request: Request, knobs: RevealKnobs) -> Canvas:
        """Fills the canvas with masks; calls nothing."""
        return Canvas.of(self.begin(request, 0), self.spec.mask)

    def step(self, params: Any, state: Canvas, knobs: RevealKnobs) -> tuple[Canvas, Revealed]:
        start = jnp.zeros_like(state.rows.length)
        tokens, positions, open_, mask = state.window(start, self.size)
        out = self.network.forward(params, tokens, positions, None, mask)
        state = state.spend(out.counts, state.rows.limit)
        hidden = out.hidden
        # each position predicts the one after it; the first one is given
        if self.spec.alignment == "next":
            hidden = jnp.roll(hidden, 1, axis=1)
        logits = self.network.logits(params, hidden)
        tokens, scores = (
            self.sample(logits, positions, state.rows, knobs),
            score.probability(logits),
        )
        where = reveal.threshold(scores, open_, knobs.threshold)
        state = state.show(tokens, where, start, self.scores(logits, tokens)).seal()
        return state, Revealed(start, scores, where)


def unread(decoder: Any, request: Request, room: int, whole: bool = True) -> BlockCanvas:
    """A canvas of blocks that no call has read, with room for a window after it."""
    rows = decoder.begin(request, room)
    canvas = Canvas.of(rows, decoder.spec.mask, decoder.block, whole=whole)
    return BlockCanvas(
        **vars(canvas),
        cache=decoder.empty_cache(request, rows.tokens.shape[1]),
        cached=canvas.block_at(rows.length),
        step=jnp.zeros_like(rows.length),
        previous=None,
    )


@dataclasses.dataclass(frozen=True)
class DualCache(DecoderBase):
    """Opens blocks from left to right; a call reads one and sees the rest of the canvas in the
    cache (Fast-dLLM, arXiv 2505.22618).

    Attributes:
      block: positions of a block.
      per_query: hand over the mask of the cache for each query, [B, W, S], instead of once, [B, S].
      renew: read the whole canvas in a block's first call, so that the cache is as old as the
        block.
      prefix: keep in the cache what is before the block alone, and read all that follows.
    """

    _: dataclasses.KW_ONLY
    block: int = 4
    per_query: bool = False
    renew: bool = False
    prefix: bool = False
    Knobs: ClassVar[type] = RevealKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True

    def init(self, params: Any, request: Request, knobs: RevealKnobs) -> BlockCanvas:
        """Reads the canvas once."""
        state = unread(self, request, self.width + 1, whole=False)
        return self._read(params, state, ~state.rows.done)[0]

    @property
    def width(self) -> int:
        """Positions of a window."""
        return self.size if self.prefix else self.block

    def step(
        self, params: Any, state: BlockCanvas, knobs: RevealKnobs
    ) -> tuple[BlockCanvas, Revealed]:
        """One call on the block that holds each row's first open position."""
        at = jnp.where(state.rows.done, state.cached, state.block_at(state.rows.length))
        opens = (at > state.cached) & self.renew
        state, call = self._read(params, dataclasses.replace(state, cached=at), opens)
        logits = self.network.logits(params, call.hidden)
        positions = at[:, None] + jnp.arange(self.block)
        tokens, scores = (
            self.sample(logits, positions, state.rows, knobs),
            score.probability(logits),
        )
        where = reveal.threshold(scores, state.masked(call.reads), knobs.threshold)
        state = state.store(self.network, call, tokens)
        state = state.show(tokens, where, at, self.scores(logits, tokens)).seal()
        return state, Revealed(at, scores, where)

    def _read(
        self, params: Any, state: BlockCanvas, renews: Bool[Array, "B"]
    ) -> tuple[BlockCanvas, BlockRead]:
        """Reads from each row's block on, or from the position before it, which predicts its first."""
        shifted = self.spec.alignment == "next"
        at, width = jnp.maximum(state.cached - shifted, 0), self.width + shifted
        position = jnp.arange(state.shown.shape[1])
        ahead = position >= (at + width)[:, None]
        elsewhere = state.inside & ((position < at[:, None]) | ahead)
        if self.per_query:
            shape = (len(at), width, len(position))
            elsewhere = jnp.broadcast_to(elsewhere[:, None], shape)
        state, call = read_span(self, params, state, at, width, renews, elsewhere)
        about = jnp.roll(call.hidden, 1, axis=1) if shifted else call.hidden
        about = window(about, state.cached - at, self.block)
        return state, dataclasses.replace(call, hidden=about)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RevokeKnobs(RevealKnobs):
    """Those of `AnyOrder`, and `keep`, the confidence below which a shown token is hidden again."""

    keep: Float[Array, ""] | float = knob(0.98, NOT_NEGATIVE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Revoked(Revealed):
    """What a call revealed, and what it hid again, [B, W]."""

    hidden: Bool[Array, "B W"]


@dataclasses.dataclass(frozen=True)
class Revoking(DecoderBase):
    """Reveals rashly and hides again what it doubts (as WINO, arXiv 2507.18578).

    Beside the canvas a call reads a shadow of the open block: masks, each of which sees everything
    but the token in whose place it stands. A block is sealed once it is complete.

    Attributes:
      block: positions of a block.
    """

    _: dataclasses.KW_ONLY
    block: int = 4
    Knobs: ClassVar[type] = RevokeKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False

    def init(self, params: Any, request: Request, knobs: RevokeKnobs) -> Canvas:
        """Fills the canvas with masks; calls nothing."""
        rows = self.begin(request, self.block)
        return Canvas.of(rows, self.spec.mask, self.block, whole=False)

    def step(self, params: Any, state: Canvas, knobs: RevokeKnobs) -> tuple[Canvas, Revoked]:
        at, start = state.block_at(state.rows.length), jnp.zeros_like(state.rows.length)
        tokens, positions, _, sees = state.window(start, self.size)
        shown, block, open_, _ = state.window(at, self.block)
        shadow = jnp.broadcast_to(jnp.eye(self.block, dtype=bool), (len(at), *[self.block] * 2))
        others = state.inside[:, None, : self.size] & (block[..., None] != jnp.arange(self.size))
        mask = jnp.concatenate(
            [
                pad_slots(sees, self.size, self.size + self.block),
                jnp.concatenate([others, shadow], 2),
            ],
            1,
        )
        fed = jnp.concatenate([tokens, jnp.full_like(block, self.spec.mask)], axis=1)
        places = jnp.concatenate([positions, block], axis=1)
        out = self.network.forward(params, fed, places, None, mask)
        state = state.spend(out.counts, state.rows.limit + self.block)

        drafts = self.network.logits(params, window(out.hidden, at, self.block))
        tokens, scores = self.sample(drafts, block, state.rows, knobs), score.probability(drafts)
        where = reveal.threshold(scores, open_, knobs.threshold)
        judged = self.network.logits(params, out.hidden[:, self.size :])
        sure = score.probability(judged, shown)
        # Fewer than are revealed, so that each call gets on.
        doubted = window(state.shown, at, self.block) & (sure < knobs.keep)
        doubted &= block >= state.rows.length[:, None]
        back = select.top(-sure, doubted, jnp.maximum(where.sum(1) - 1, 0))
        state = state.show(tokens, where, at, self.scores(drafts, tokens))
        state = state.hide(back, at, self.spec.mask)
        complete = ~jnp.any(window(state.open, at, self.block), axis=1)
        state = state.seal(jnp.where(complete, at + self.block, at))
        return state, Revoked(at, scores, where, back)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenKnobs(DenoisingKnobs):
    """Denoising, and `share`, how much of a block is shown before the next one opens."""

    share: Float[Array, ""] | float = knob(0.5, NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class OpenBlocks(RuledDecoder):
    """Denoises several blocks at once; each sees those before it (as D2F, arXiv 2508.09192).

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      blocks: K, blocks that may be open.
      rule: one of `choose.RULES`.
    """

    _: dataclasses.KW_ONLY
    blocks: int = 2
    rule: str = "threshold"
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    Knobs: ClassVar[type] = OpenKnobs

    def init(self, params: Any, request: Request, knobs: OpenKnobs) -> BlockCanvas:
        """Reads the prompts' whole blocks; room for K blocks after them."""
        state = unread(self, request, self.blocks * self.block)
        state, call = read_prompt(self, params, state, request, opens=False)
        return state.store(self.network, call, state.rows.tokens)

    def step(
        self, params: Any, state: BlockCanvas, knobs: OpenKnobs
    ) -> tuple[BlockCanvas, Revealed]:
        """One call on the open blocks; the first is stored where it was clean before."""
        at, block, count, clean = state.cached, self.block, self.blocks, state.clean
        tokens, _, open_, _ = state.window(at, count * block)
        tokens, open_ = (x.reshape(len(at), count, block) for x in (tokens, open_))
        begin = at[:, None] + block * jnp.arange(count)
        enough = jnp.mean(~open_, axis=2) >= knobs.share
        follows = jnp.cumprod(enough[:, :-1], axis=1) * window(state.inside, at + block, 1)
        reads = jnp.concatenate([jnp.ones_like(clean)[:, None], follows > 0], axis=1)
        reads &= ~state.rows.done[:, None]
        tree = Windows(tokens, begin, reads, jnp.arange(count) - 1)
        call = forward_tree(self.network, params, Prefix(state.cache, at), tree)
        state = state.spend(call.counts, block * reads.sum(1))

        logits = self.network.logits(params, call.each)
        step = jnp.broadcast_to(state.step[:, None], begin.shape)
        choose = jax.vmap(lambda *of_block: self.choose(*of_block, state.rows, knobs), 1, 1)
        choice = choose(logits, open_ & reads[..., None], begin, step)
        choice = jax.tree.map(lambda x: x.reshape(len(at), -1), choice)
        state = state.show(choice.tokens, choice.where, at, choice.log_probs).seal()
        read = BlockRead(call.each[:, 0], call.each[:, 0], at, call.kv, reads[:, 0], clean)
        state = state.store(self.network, read, choice.tokens)
        state = state.after_block(clean, block, call.each[:, 0, -1:])
        return state, Revealed(at, choice.scores, choice.where)
