"""A token for each mask of a window, and how sure the network is of it; which of them a call
reveals.

For each masked position a token x is drawn, after temperature, top-k and top-p. Its score c is, by
the decoder's order::

    confidence    p(x)                          raw        LLaDA
    margin        p_1 - p_2, the two largest    filtered   Dream
    entropy       sum p log p                   filtered   Dream
    random        a number of its own                      LLaDA

in the distribution p that `confidence` names (see `rules.score.shaped`), the mask's share included.
With n masks in the block, n_0 when it was opened, and step i of its N::

    static       n_0 // N surest ones, one more in the first n_0 mod N steps      LLaDA
    rounded      round(n / (N - i))                                               MDLM of dllm
    grid         trunc(n (1 - t_(i+1) / t_i)), t from 1 to epsilon; the last all  Dream
    capped       as threshold, and by step i no more than i + 1 shares of n_0     Fast-dLLM for Dream
    threshold    all with c >= tau, and the surest                                Fast-dLLM (2505.22618)
    factor       the r surest as long as c_r >= 1 - f / (r + 1), at least one     Fast-dLLM
    entropy      the lowest H as long as sum H < gamma, at least one              JetEngine
    bound        the lowest H as long as sum H - max H <= gamma                   2505.24857

A step that reveals nothing calls nothing. Ties go to the lower position.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import MOST
from paradec_jax.decode.canvas.blocks import BlockCanvas
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.canvas.choose import GAMMA, THRESHOLD, DenoisingKnobs, threshold_at
from paradec_jax.decode.canvas.guidance import Guided
from paradec_jax.decode.machine import (
    COUNT,
    NOT_NEGATIVE,
    SHARE,
    UNLIMITED,
    DecoderBase,
    Forward,
    Number,
    Prefix,
    Request,
    Scheduled,
    Whole,
    knob,
)
from paradec_jax.decode.rules import (
    TINY,
    Purpose,
    number_of,
    positions_of,
    reveal,
    score,
    select,
    uniform_at,
    without_mask,
)
from paradec_jax.decode.rules.subs import RULED_OUT
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.records import choices, pytree

AnyState = TypeVar("AnyState", bound="CanvasState")

# Orders by score change the law: what is revealed then depends on what the network says.
SCORES: dict[str, Callable[[Array, Array], Array]] = {
    "confidence": score.probability,
    "margin": lambda logits, tokens: score.margin(logits),
    "entropy": lambda logits, tokens: -score.entropy(logits),
}
# What a score is taken from: LLaDA's confidence from the raw softmax, Dream's two from the filtered
# one.
TAKEN_FROM = {"confidence": "raw", "margin": "filtered", "entropy": "filtered"}
ORDERS = (*SCORES, "random")
COUNTED = ("static", "rounded", "grid", "capped")
RULES = (*COUNTED, "threshold", "factor", "entropy", "bound")


@pytree
class CanvasKnobs(DenoisingKnobs):
    """Sampling, and how much a call reveals.

    Attributes:
      steps: N, steps of a block; None is one position a step.
      threshold, entropy, factor: tau, gamma, f.
      epsilon: last time of Dream's grid.
      spread: temperature at which positions are drawn by their scores, Dream's `alg_temp`; at 0 the
        surest are taken.
      stop_bias: what is added to the logits of the checkpoint's stop tokens: below 0 texts end
        later, at -inf never.
      guidance: w, how much more what was given weighs (`canvas.guidance`); 0 is not at all.
    """

    steps: Whole | None = knob(None, COUNT, unset=UNLIMITED, needs=("rule", COUNTED))
    threshold: Scheduled | None = knob(
        None, NOT_NEGATIVE, unset=THRESHOLD, needs=("rule", ("threshold", "capped"))
    )
    entropy: Number | None = knob(
        None, NOT_NEGATIVE, unset=GAMMA, needs=("rule", ("entropy", "bound"))
    )
    epsilon: Number | None = knob(None, SHARE, unset=1e-3, needs=("rule", ("grid",)))
    spread: Number | None = knob(None, NOT_NEGATIVE, unset=0.0, needs=("order", tuple(SCORES)))
    stop_bias: Number | None = knob(None, unset=0.0)
    guidance: Number | None = knob(None, NOT_NEGATIVE, unset=1.0, needs=("guided", (True,)))


@pytree
class CanvasState(BlockCanvas):
    """A canvas whose open block, at `cached`, holds the row's first mask.

    Attributes:
      todo: masks that the open block had when it was opened, [B]; 0 before the first one is.
      age: calls since the row's cache was renewed, [B].
      guidance: w, where the canvas is read a second time without what was given; else None.
    """

    todo: Int[Array, "B"]
    age: Int[Array, "B"]
    guidance: Float[Array, ""] | None

    def opened(self: AnyState) -> tuple[AnyState, Bool[Array, "B"]]:
        """The canvas at the block of each running row's first mask, and rows that it is new to."""
        at = jnp.where(self.rows.done, self.cached, self.block_at(self.rows.length))
        opens = ((at != self.cached) | (self.todo == 0)) & ~self.rows.done
        moved = dataclasses.replace(self, cached=at, step=jnp.where(opens, 0, self.step))
        masks = number_of(moved.masked(opens))
        return dataclasses.replace(moved, todo=jnp.where(opens, masks, self.todo)), opens


@pytree
class Weighed:
    """What a call says about a window; zero where nobody asked.

    Attributes:
      tokens: the token drawn for each position, [B, W].
      scores: how sure it is, [B, W].
      log_probs: its log-probability, where they are kept.
      more: what the decoder's `judge` adds.
    """

    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]
    log_probs: Float[Array, "B W"] | None
    more: Any = None


@pytree
class Filled:
    """What a call did to a window of each row's canvas.

    Attributes:
      at: first position of the window, [B].
      where: positions that it revealed, [B, W].
      tokens, scores: of what was masked, the tokens drawn, and how sure they were, [B, W].
      hidden: hidden states about the window's positions, [B, W, D].
    """

    at: Int[Array, "B"]
    where: Bool[Array, "B W"]
    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]
    hidden: Float[Array, "B W D"]


@choices
class CanvasDecoder(DecoderBase):
    """What decoders of a canvas in which every position sees all share; `SemiAutoregressive` says
    what the fields mean.
    """

    length: int | None = 32
    rule: str = "threshold"
    order: str = "confidence"
    confidence: str | None = None
    stops_last: bool = False
    guided: bool = False
    chunk: int = 64
    Knobs = CanvasKnobs
    visibilities = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order = True
    needs_cache = False
    BOUNDS = {**DecoderBase.BOUNDS, "length": (1, MOST)}  # noqa: RUF012  as long as the canvas at most
    WORDS = {**DecoderBase.WORDS, "rule": RULES, "order": ORDERS}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        score.check_confidence(self)
        if self.rule in ("entropy", "bound") and self.order != "entropy":
            raise ValueError(f"rule {self.rule} needs order entropy, not {self.order}")

    @property
    def block(self) -> int:
        """B, positions of a block; the whole canvas where `length` is None."""
        return self.size if self.length is None else min(self.length, self.size)

    @property
    def readings(self) -> int:
        """How often a call reads a position."""
        return 1 + self.guided

    @property
    def reader(self) -> Any:
        """The network, or both of its readings."""
        return Guided(network=self.network, mask=self.mask) if self.guided else self.network

    def init(self, params: Any, request: Request, knobs: Any) -> CanvasState:
        """Fills the canvas with masks; calls nothing."""
        return self.blank(request, knobs, self.block)

    def blank(self, request: Request, knobs: Any, room: int, cached: bool = False) -> CanvasState:
        """Masks everywhere but at given tokens, with room for a window of so many positions."""
        rows = self.begin(request, room)
        canvas = Canvas.of(rows, self.mask, self.block, "prompt", whole=False)
        none = jnp.zeros_like(rows.length)
        return CanvasState(
            **vars(canvas),
            cache=self.reader.init_cache(rows.keys, self.size) if cached else None,
            cached=canvas.block_at(rows.length),
            step=none,
            previous=None,
            todo=none,
            age=none,
            guidance=knobs.guidance,
        )

    def read(
        self,
        params: Any,
        state: CanvasState,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None,
        mask: Bool[Array, "B W W"],
    ) -> Forward:
        """A call on positions of the canvas, and perhaps on others, which count as revealed."""
        if not self.guided:
            return self.network.forward(params, tokens, positions, prefix, mask)
        given = jnp.take_along_axis(state.given, positions, axis=1) & (tokens != self.mask)
        return self.reader.forward(params, tokens, positions, prefix, mask, given, state.guidance)

    def judge(
        self,
        logits: Float[Array, "B C V"],
        state: CanvasState,
        positions: Int[Array, "B C"],
        knobs: Any,
    ) -> Weighed:
        """A token for each position, given the logits about it, and how sure it is."""
        logits = at_least_float32(logits)
        stops = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(self.spec.stop, jnp.int32))
        logits = jnp.where(stops, logits + knobs.stop_bias, logits)
        able = without_mask(logits, self.mask)
        tokens = self.sample(able, positions, state.rows, knobs, step=state.step)
        scores = jnp.zeros(tokens.shape)
        if self.order in SCORES:
            taken = self.confidence or TAKEN_FROM[self.order]
            likely = score.shaped(logits, taken, knobs, top_p_rule=self.top_p_rule)
            if self.stops_last:
                likely = jnp.where(stops, likely + RULED_OUT, likely)
            scores = SCORES[self.order](likely, tokens)
        return Weighed(tokens, scores, self.scores(able, tokens))

    def weigh(
        self,
        params: Any,
        state: CanvasState,
        hidden: Float[Array, "B W D"],
        at: Int[Array, "B"],
        where: Bool[Array, "B W"],
        knobs: Any,
    ) -> Weighed:
        """`judge` at some positions of a window that begins at `at`, and their order."""

        def of_some(hidden: Array, slots: Array) -> Weighed:
            logits = self.network.logits(params, hidden)
            return self.judge(logits, state, at[:, None] + slots, knobs)

        sure = by_chunks(of_some, hidden, where, self.chunk, self.bounded)
        numbers = self.numbers(state, at[:, None] + jnp.arange(hidden.shape[1]))
        if self.order == "random":
            return dataclasses.replace(sure, scores=numbers)
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, TINY)))
        drawn = sure.scores / jnp.maximum(knobs.spread, TINY) + gumbel
        return dataclasses.replace(sure, scores=jnp.where(knobs.spread > 0, drawn, sure.scores))

    def numbers(self, state: CanvasState, positions: Int[Array, "B W"]) -> Float[Array, "B W"]:
        """Uniform numbers that order positions of this call: where orders are random, the scores."""
        return uniform_at(state.rows.keys, Purpose.REVEAL, positions, state.step)

    def due(
        self, state: AnyState, masks: Int[Array, "B"], knobs: Any
    ) -> tuple[AnyState, Int[Array, "B"]]:
        """The canvas at the next step that reveals any of its block's masks, and how many that is."""
        if self.rule not in COUNTED:
            return state, masks
        total = state.todo
        steps = jnp.where(knobs.steps == UNLIMITED, total, knobs.steps)

        def count(step: Array) -> Array:
            if self.rule == "grid":
                return reveal.on_grid(masks, step, steps, knobs.epsilon)
            if self.rule == "rounded":
                return reveal.rounded(masks, step, steps)
            if self.rule == "capped":
                return reveal.shares(total, steps, step) - (total - masks)
            return reveal.share(total, steps, step)

        def idle(step: Array) -> Array:
            return (count(step) <= 0) & (masks > 0)

        step = state.step
        if self.rule != "static":  # whose shares fall, so that none before the last mask is nothing
            step = lax.while_loop(
                lambda step: jnp.any(idle(step)), lambda step: step + idle(step), step
            )
        return dataclasses.replace(state, step=step), count(step)

    def reveals(
        self,
        scores: Float[Array, "B W"],
        masked: Bool[Array, "B W"],
        count: Int[Array, "B"],
        step: Int[Array, "B"],
        knobs: Any,
    ) -> Bool[Array, "B W"]:
        """Which of the masked positions the rule reveals, given their scores and how many are due."""
        if self.rule == "factor":
            return reveal.factor(scores, masked, knobs.factor)
        if self.rule in ("entropy", "bound"):
            within = reveal.entropy_budget if self.rule == "entropy" else reveal.entropy_bound
            return within(-scores, masked, knobs.entropy)
        if self.rule == "threshold":
            return reveal.threshold(scores, masked, threshold_at(step, knobs))
        surest = select.top(scores, masked, count)
        if self.rule == "capped":
            return reveal.threshold(scores, surest, threshold_at(step, knobs))
        return surest


def by_chunks(
    function: Callable[[Array, Array], Any],
    hidden: Float[Array, "B W D"],
    where: Bool[Array, "B W"],
    chunk: int,
    bounded: bool,
) -> Any:
    """A function of hidden states, at some positions of each row, C at a time.

    How many positions a call reveals is drawn, and the knobs move it, so no shape may depend on it:
    chunks of a fixed width go as far as the fullest row needs. The largest array is [B, C, V],
    whatever the canvas.

    Args:
      function: (hidden [B, C, D], slots [B, C]) -> a tree of [B, C, ...].
      where: the positions, in whose place the results are put.
      chunk: C, positions of a row at a time.
      bounded: whether to go through all W positions, which reverse mode can cross.

    Returns:
      A tree of [B, W, ...], zero at the other positions.
    """
    batch, width = where.shape
    if width <= chunk:  # in one piece, without a loop
        new = function(hidden, positions_of(where))

        def kept(x: Array) -> Array:
            return jnp.where(where.reshape(batch, width, *[1] * (x.ndim - 2)), x, 0)

        return jax.tree.map(kept, new)
    most = -(-width // chunk)
    count = number_of(where)
    order = jnp.argsort(~where, axis=1, stable=True).astype(jnp.int32)
    order = jnp.where(jnp.arange(width) < count[:, None], order, width)  # `width` for none
    order = jnp.pad(order, ((0, 0), (0, most * chunk - width)), constant_values=width)

    def body(i: Array, results: Any) -> Any:
        slots = lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
        new = function(jnp.take_along_axis(hidden, slots[..., None], 1, mode="clip"), slots)
        # Row by row: numbers of rows as indices would gather all rows on every device of a mesh.
        scatter = jax.vmap(lambda old, at, x: old.at[at].set(x, mode="drop"))
        return jax.tree.map(lambda old, x: scatter(old, slots, x), results, new)

    shapes = jax.eval_shape(function, hidden[:, :chunk], order[:, :chunk])
    empty = jax.tree.map(lambda x: jnp.zeros((batch, width, *x.shape[2:]), x.dtype), shapes)
    return lax.fori_loop(0, most if bounded else (jnp.max(count) + chunk - 1) // chunk, body, empty)
