"""What samplers of masked canvases share: their knobs, who is revealed next, and the draw of the revealed tokens.

Which positions a call reveals is settled before the network is asked about them, and only then is a token drawn for
each. A draw that decides both at once, over the vocabulary and the mask together, compares small probabilities with
noise of few digits, and loses the rare tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_sizes, check_words
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import UNLIMITED, SamplingKnobs, check_range, knob
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.masked.canvas import Canvas
from paradec_jax.decode.rules import partition, reveal, score
from paradec_jax.decode.rules.subs import without_mask

AnyCanvas = TypeVar("AnyCanvas", bound=Canvas)

# Orders by score change the law: what is revealed then depends on what the network says.
SCORES: dict[str, Callable[[Array, Array], Array]] = {
    "confidence": score.probability,
    "margin": lambda logits, tokens: score.margin(logits),
    "entropy": lambda logits, tokens: score.negative_entropy(logits),
}
# What a score is taken from: LLaDA's confidence from the raw softmax, Dream's two from the filtered one.
TAKEN_FROM = {"confidence": "raw", "margin": "filtered", "entropy": "filtered"}
GROUPED = ("random", *SCORES)
ORDERS = ("random", "single", *SCORES)
GRIDS = ("linear", "cosine")
STEPS = 128  # where the knob is not set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedKnobs(SamplingKnobs):
    """Sampling from the denoiser's own distribution unless told otherwise, and the grid of times.

    Attributes:
      steps: N, steps of the grid; None is 128, or the length of a grid of one's own. Steps that reveal nothing
        call nothing.
      grid: "linear" (None) or "cosine", or times [K] that fall from 1, at which the K calls are made. How many they
        are is compiled.
    """

    temperature: Float[Array, ""] | float = 1.0
    steps: Int[Array, ""] | int | None = knob(None, unset=UNLIMITED, needs=("order", GROUPED))
    grid: Float[Array, "*K"] | Int[Array, ""] | Literal["linear", "cosine"] | None = knob(
        None, unset=0, needs=("order", GROUPED)
    )

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        super().check()
        check_range(self.steps, "steps", lambda n: n >= 1, "at least 1")
        grid: Any = self.grid
        if isinstance(grid, str) and grid not in GRIDS:
            raise ValueError(f"grid must be {' or '.join(GRIDS)} or an array of times, not {grid!r}")
        if isinstance(grid, str | jax.core.Tracer) or np.ndim(grid) == 0:
            return
        check_range(
            grid,
            "grid",
            lambda t: t.ndim == 1 and t[0] == 1 and t[-1] > 0 and (np.diff(t) < 0).all(),
            "times that fall from 1 to above 0",
        )
        if not isinstance(self.steps, jax.core.Tracer) and self.steps not in (None, UNLIMITED):
            told = f"a grid of {len(grid)} times has as many steps"
            raise ValueError(f"{told}, so steps must be None, not {self.steps}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedState(Canvas):
    """A canvas and its partition.

    Attributes:
      groups: group of each position that was masked at first, `partition.NEVER` elsewhere, [B, S].
    """

    groups: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unmasked:
    """What a call did to a window of each row's canvas.

    Attributes:
      at: the window's first position, [B].
      where: positions that it revealed, [B, W].
      scores: by which it chose them, [B, W]; None where they were drawn at random.
    """

    at: Int[Array, "B"]
    where: Bool[Array, "B W"]
    scores: Float[Array, "B W"] | None


def groups_of(canvas: Canvas, order: str, knobs: Any) -> Int[Array, "B S"]:
    """The partition of a fresh canvas, drawn with each row's key."""
    positions = jnp.broadcast_to(jnp.arange(canvas.final.shape[1]), canvas.final.shape)
    bits, open_ = partition.words(canvas.rows.keys, positions), canvas.open
    if order == "single":
        groups = partition.single(bits, open_)
    elif jnp.ndim(knobs.grid) == 1:
        groups = partition.at_times(bits, knobs.grid)
    else:
        steps = jnp.where(knobs.steps == UNLIMITED, STEPS, knobs.steps)
        groups = jnp.where(knobs.grid == 0, partition.linear(bits, steps), partition.cosine(bits, steps))
    return jnp.where(open_, groups, partition.NEVER)


def by_chunks(
    function: Callable[[Array, Array], Any],
    hidden: Float[Array, "B W D"],
    where: Bool[Array, "B W"],
    chunk: int,
    bounded: bool,
) -> Any:
    """A function of head inputs, at some positions of each row: so many at a time that the chunk is compiled.

    How many positions a call reveals is drawn, and the knobs move it, so no shape may depend on it: chunks of a fixed
    width go as far as the fullest row needs. The largest array is [B, C, V], whatever the canvas.

    Args:
      function: (hidden [B, C, D], slots [B, C]) -> a tree of [B, C, ...].
      hidden: head inputs of a window.
      where: the positions, in whose place the results are put.
      chunk: C, positions of a row at a time.
      bounded: go through all W positions, which reverse mode can cross.

    Returns:
      A tree of [B, W, ...], zero at the other positions.
    """
    batch, width = where.shape
    chunk = min(chunk, width)
    most = -(-width // chunk)
    order = jnp.argsort(~where, axis=1, stable=True).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, most * chunk - width)), constant_values=width - 1)
    count = jnp.sum(where, axis=1, dtype=jnp.int32)

    def some(i: Array) -> tuple[Any, Array]:
        slots = lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
        return function(jnp.take_along_axis(hidden, slots[..., None], axis=1), slots), slots

    def body(i: Array, found: Any) -> Any:
        new, slots = some(i)
        used = i * chunk + jnp.arange(chunk) < count[:, None]
        slots = jnp.where(used, slots, width)
        # Row by row: numbers of rows as indices would gather all rows on every device of a mesh.
        put = jax.vmap(lambda old, at, x: old.at[at].set(x, mode="drop"))
        return jax.tree.map(lambda old, x: put(old, slots, x), found, new)

    shapes = jax.eval_shape(lambda: some(jnp.int32(0))[0])
    empty = jax.tree.map(lambda x: jnp.zeros((batch, width, *x.shape[2:]), x.dtype), shapes)
    return lax.fori_loop(0, most if bounded else (jnp.max(count) + chunk - 1) // chunk, body, empty)


Draw = Callable[[Array, Array], tuple[Array, Any]]


def unmask(
    decoder: Any,
    params: Any,
    canvas: AnyCanvas,
    hidden: Float[Array, "B W D"],
    at: Int[Array, "B"],
    groups: Int[Array, "B W"],
    open_: Bool[Array, "B W"],
    draw: Draw,
    knobs: MaskedKnobs,
) -> tuple[AnyCanvas, Unmasked, Any]:
    """Reveals each row's next group in a window whose head inputs the network has given.

    Args:
      decoder: with fields `order`, `confidence` and `chunk`.
      params: of its network.
      canvas: of which `at` begins the window.
      hidden: the window's head inputs.
      groups: of the positions that the window is to reveal, `partition.NEVER` elsewhere.
      open_: those of them that are still masked.
      draw: (logits [B, C, V], positions [B, C]) -> tokens [B, C] and whatever else is wanted of them.
      knobs: temperature and filters, which some scores look at.

    Returns:
      The canvas, what was revealed, and what else `draw` returned, zero where it was not called.
    """
    score_of = SCORES.get(decoder.order)

    def read(hidden: Array, slots: Array) -> tuple[Array, Array | None, Array | None, Any]:
        logits = without_mask(decoder.network.logits(params, hidden), decoder.spec.mask)
        tokens, extra = draw(logits, at[:, None] + slots)
        scores = None
        if score_of is not None:
            confidence = decoder.confidence or TAKEN_FROM[decoder.order]
            likely = score.shaped(logits, confidence, knobs, top_p_rule=decoder.top_p_rule)
            scores = score_of(likely, tokens)
        return tokens, decoder.scores(logits, tokens), scores, extra

    where = partition.next_group(groups, open_) if score_of is None else open_
    tokens, log_probs, scores, extra = by_chunks(read, hidden, where, decoder.chunk, decoder.bounded)
    if score_of is not None:
        count = partition.next_count(groups, groups != partition.NEVER, open_)
        where = reveal.quota(scores, open_, count)
    return canvas.reveal(tokens, where, at, log_probs), Unmasked(at, where, scores), extra


def begin(decoder: Any, rows: Rows, knobs: MaskedKnobs) -> MaskedState:
    """The canvas of fresh rows with its partition."""
    canvas = Canvas.of(rows, decoder.spec.mask)
    return MaskedState(**vars(canvas), groups=groups_of(canvas, decoder.order, knobs))


@dataclasses.dataclass(frozen=True)
class MaskedDecoder(DecoderBase):
    """What samplers of masked canvases share; `Masked` says what the fields mean."""

    _: dataclasses.KW_ONLY
    order: str = "random"
    confidence: str | None = None
    chunk: int = 64
    Knobs: ClassVar[type] = MaskedKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_words(self, order=ORDERS)
        check_sizes(self, "chunk")
        score.check_confidence(self)
        if self.confidence is not None and self.order not in SCORES:
            raise ValueError(f"confidence needs order {' or '.join(SCORES)}, not {self.order}")


def plain_draw(decoder: Any, rows: Rows, knobs: MaskedKnobs) -> Draw:
    """Tokens by each row's key and nothing else."""

    def draw(logits: Array, positions: Array) -> tuple[Array, None]:
        return decoder.sample(logits, positions, rows, knobs), None

    return draw
