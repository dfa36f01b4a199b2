"""Two decoders that no paper needs, to show that the machine has room: they run through every
driver and law.

`AnyOrder` reveals a canvas from nothing or around given tokens, `DualCache` sees its cache through
a mask with the open block cut out.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, SamplingKnobs, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import reveal, score
from paradec_jax.decode.rules.windows import window, write_after_read


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
        if (
            self.spec.alignment == "next"
        ):  # each position predicts the one after it; the first one is given
            hidden = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
        logits = self.network.logits(params, hidden)
        tokens, scores = (
            self.sample(logits, positions, state.rows, knobs),
            score.probability(logits),
        )
        where = reveal.threshold(scores, open_, knobs.threshold)
        state = state.reveal(tokens, where, start, self.scores(logits, tokens))
        return state, Revealed(start, scores, where)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualCacheState(Canvas):
    """The canvas, with keys and values of all its positions, those outside the open block as they
    once were.
    """

    cache: Any

    @property
    def cached(self) -> Int[Array, "B"]:
        """Trusted entries: none, each is as old as its block."""
        return jnp.zeros_like(self.rows.length)


@dataclasses.dataclass(frozen=True)
class DualCache(DecoderBase):
    """Opens blocks from left to right; a call reads one and sees the rest of the canvas in the
    cache.

    Attributes:
      block: positions of a block.
      per_query: hand over the mask of the cache for each query, [B, W, S], instead of once, [B, S].
    """

    _: dataclasses.KW_ONLY
    block: int = 4
    per_query: bool = False
    Knobs: ClassVar[type] = RevealKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True

    def init(self, params: Any, request: Request, knobs: RevealKnobs) -> DualCacheState:
        """Reads the canvas once."""
        canvas = Canvas.of(self.begin(request, self.block), self.spec.mask)
        start, width = jnp.zeros_like(canvas.rows.length), canvas.shown.shape[1]
        tokens, positions, _, mask = canvas.window(start, width)
        out = self.network.forward(params, tokens, positions, None, mask)
        cache = self.network.write(self.empty_cache(request, width), out.kv, start)
        return DualCacheState(**vars(canvas.spend(out.counts, canvas.rows.limit)), cache=cache)

    def step(
        self, params: Any, state: DualCacheState, knobs: RevealKnobs
    ) -> tuple[DualCacheState, Revealed]:
        """One call on the block that holds each row's first open position."""
        at = state.rows.length // self.block * self.block
        tokens, positions, open_, mask = state.window(at, self.block)
        elsewhere = state.inside & (
            jnp.arange(state.shown.shape[1]) // self.block != at[:, None] // self.block
        )
        if self.per_query:
            elsewhere = jnp.broadcast_to(elsewhere[:, None], (*positions.shape, elsewhere.shape[1]))
        out = self.network.forward(params, tokens, positions, Prefix(state.cache, elsewhere), mask)
        state = state.spend(out.counts, jnp.sum(window(state.inside, at, self.block), axis=1))
        logits = self.network.logits(params, out.hidden)
        tokens, scores = (
            self.sample(logits, positions, state.rows, knobs),
            score.probability(logits),
        )
        where = reveal.threshold(scores, open_, knobs.threshold)
        state = state.reveal(tokens, where, at, self.scores(logits, tokens))
        cache = self.network.write(state.cache, out.kv, write_after_read(at, tokens))
        return dataclasses.replace(state, cache=cache), Revealed(at, scores, where)
