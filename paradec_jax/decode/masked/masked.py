"""Masked diffusion: a denoiser reveals a canvas of masks, many positions a call, in a drawn order
or by score.

In a drawn order, which positions a call reveals is settled before the network is asked about them,
and only then is a token drawn for each. A draw that decides both at once, over the vocabulary and
the mask together, compares small probabilities with noise of few digits, and loses the rare tokens
(arXiv 2409.02908).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_words
from paradec_jax.decode.canvas import SCORES, TAKEN_FROM, AnyCanvas, Canvas, by_chunks
from paradec_jax.decode.machine import (
    COUNT,
    NOT_NEGATIVE,
    UNLIMITED,
    DecoderBase,
    Number,
    Request,
    SamplingKnobs,
    Whole,
    check_range,
    knob,
)
from paradec_jax.decode.rules import partition, positions_of, score, select, window, without_mask
from paradec_jax.records import choices, pytree

GROUPED = ("random", *SCORES)
ORDERS = ("random", "single", *SCORES)
GRIDS = ("linear", "cosine")
STEPS = 128  # where the knob is not set


@pytree
class MaskedKnobs(SamplingKnobs):
    """Sampling, by default from the denoiser's own distribution, and the grid of times.

    Attributes:
      steps: N, steps of the grid; None is 128, or the length of a grid of one's own. Steps that
        reveal nothing call nothing.
      grid: "linear" (None) or "cosine", or times [K] that fall from 1, at which the K calls are
        made. How many they are is compiled.
    """

    temperature: Number = knob(1.0, NOT_NEGATIVE)
    steps: Whole | None = knob(None, COUNT, unset=UNLIMITED, needs=("order", GROUPED))
    grid: Float[Array, "*K"] | Int[Array, ""] | Literal["linear", "cosine"] | None = knob(
        None, unset=0, needs=("order", GROUPED)
    )

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        super().check()
        grid: Any = self.grid
        if isinstance(grid, str) and grid not in GRIDS:
            raise ValueError(
                f"grid must be {' or '.join(GRIDS)} or an array of times, not {grid!r}"
            )
        if isinstance(grid, str | jax.core.Tracer) or np.ndim(grid) == 0:
            return
        check_range(
            grid,
            "grid",
            lambda t: t.ndim == 1 and t[0] == 1 and t[-1] > 0 and (np.diff(t) < 0).all(),
            "times that fall from 1 to above 0",
        )
        if not isinstance(self.steps, jax.core.Tracer) and self.steps not in (None, UNLIMITED):
            raise ValueError(
                f"a grid of {len(grid)} times has as many steps, so steps must be None, not {self.steps}"
            )


@pytree
class MaskedState(Canvas):
    """A canvas and its partition.

    Attributes:
      groups: group of each position that was masked at first, `partition.NEVER` elsewhere, [B, S].
    """

    groups: Int[Array, "B S"]


@pytree
class UnmaskedInfo:
    """What a call did to a window of each row's canvas.

    Attributes:
      at: first position of the window, [B].
      where: positions that it revealed, [B, W].
      scores: by which it chose them, [B, W]; None where they were drawn at random.
    """

    at: Int[Array, "B"]
    where: Bool[Array, "B W"]
    scores: Float[Array, "B W"] | None


@choices
class MaskedDecoder(DecoderBase):
    """What samplers of masked canvases share; `Masked` says what the fields mean."""

    order: str = "random"
    confidence: str | None = None
    chunk: int = 64
    Knobs = MaskedKnobs
    visibilities = ("full",)
    alignments = ("own", "next")
    any_order = True
    needs_cache = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, order=ORDERS)
        score.check_confidence(self)
        if self.confidence is not None and self.order not in SCORES:
            raise ValueError(f"confidence needs order {' or '.join(SCORES)}, not {self.order}")

    def fill(self, request: Request, scratch: int, knobs: Any) -> MaskedState:
        """Masks everywhere but at given tokens, and their partition, drawn with each row's key."""
        canvas = Canvas.of(self.begin(request, scratch), self.mask)
        positions = positions_of(canvas.shown)
        bits, open_ = partition.words(canvas.rows.keys, positions), canvas.open
        if self.order == "single":
            groups = partition.single(bits, open_)
        elif jnp.ndim(knobs.grid) == 1:
            groups = partition.at_times(bits, knobs.grid)
        else:
            steps = jnp.where(knobs.steps == UNLIMITED, STEPS, knobs.steps)
            groups = jnp.where(
                knobs.grid == 0, partition.linear(bits, steps), partition.cosine(bits, steps)
            )
        return MaskedState(**vars(canvas), groups=jnp.where(open_, groups, partition.NEVER))

    def unmask(
        self,
        params: Any,
        state: AnyCanvas,
        hidden: Float[Array, "B W D"],
        at: Int[Array, "B"],
        groups: Int[Array, "B W"],
        knobs: MaskedKnobs,
        drawn: Any = None,
    ) -> tuple[AnyCanvas, UnmaskedInfo, Any]:
        """The step that a call makes in a window of each row's canvas.

        Args:
          params, knobs: as for `step`.
          state: the canvas.
          hidden: hidden states of the window's positions, the first of which is given or not wanted
            where each is about the next one.
          at: first position of the window.
          groups: their groups, `partition.NEVER` where another window reveals them.
          drawn: logits, positions -> tokens, and more; `sample` by default.

        Returns:
          The canvas, what was done, and what `drawn` returned beside tokens, zero where nothing was
          needed.
        """
        open_ = window(state.open, at, hidden.shape[1])
        if self.spec.alignment == "next":
            hidden = jnp.roll(hidden, 1, axis=1)

        # A mask stays with probability s / t, whatever the network says: who leaves was drawn in
        # `init`. By score all open positions of the window compete.
        by_score = self.order in SCORES
        needed = open_ if by_score else partition.next_group(groups, open_)

        # A token that is revealed has the law x_theta, which SUBS keeps from being the mask.
        def read(hidden: Array, slots: Array) -> Any:
            logits = without_mask(self.network.logits(params, hidden), self.spec.mask)
            positions, more, scores = at[:, None] + slots, None, None
            if drawn is None:
                tokens = self.sample(logits, positions, state.rows, knobs)
            else:
                tokens, more = drawn(logits, positions)
            if by_score:
                confidence = self.confidence or TAKEN_FROM[self.order]
                likely = score.shaped(logits, confidence, knobs, top_p_rule=self.top_p_rule)
                scores = SCORES[self.order](likely, tokens)
            return tokens, self.scores(logits, tokens), scores, more

        tokens, log_probs, scores, more = by_chunks(read, hidden, needed, self.chunk, self.bounded)

        # As many as the next group has are revealed, by score the surest. Known tokens are carried
        # over: `show` changes open positions alone.
        where = needed
        if by_score:
            count = partition.next_count(groups, groups != partition.NEVER, needed)
            where = select.top(scores, needed, count)
        state = state.show(tokens, where, at, log_probs).seal()
        return state, UnmaskedInfo(at, where, scores), more


@choices
class Masked(MaskedDecoder):
    """Reveals a canvas in groups that were drawn at random, one network call each.

    ::

        canvas   _ _ _ _ _ _ _ _
        call 1   _ e _ _ _ f _ _      {1, 5}
        call 2   a e _ c _ f _ g      {0, 3, 7}
        call 3   a e b c _ f h g      {2, 6}, and so on

    With order "random" the law of the text is that of ancestral sampling over N steps (MDLM, arXiv
    2406.07524; with or without its cache, and of the analytic sampler, whose law is the same under
    SUBS and a log-linear schedule), without the steps in which nothing happens; "single" is its
    limit for N to infinity, a position a call. The network does not know the time, so each row
    keeps its own: a batch takes as many calls as its longest row has groups.

    The orders "confidence" (of the drawn token), "margin" and "entropy" reveal as many positions as
    the next group holds, but the surest. They change the law: what is written depends on where the
    network is sure.

    Scores may be about their own position or, as Dream's, about the next one; a row then begins
    with a given token.

    Attributes:
      order: "random", "single", "confidence", "margin" or "entropy".
      confidence: distribution that a score is taken from, "raw", "tempered" or "filtered" (see
        `rules.score.shaped`); None is the paper's: raw for "confidence" (LLaDA), filtered for
        "margin" and "entropy" (Dream).
      chunk: C, positions of a row whose logits exist at once.
    """

    def init(self, params: Any, request: Request, knobs: MaskedKnobs) -> MaskedState:
        """Fills the canvas with masks and draws their partition; calls nothing."""
        return self.fill(request, 0, knobs)

    def step(
        self, params: Any, state: MaskedState, knobs: MaskedKnobs
    ) -> tuple[MaskedState, UnmaskedInfo]:
        """One step of MDLM's reverse process from t to s, for each row's next group (arXiv
        2406.07524, Eq. 7).
        """
        at = jnp.zeros_like(state.rows.length)
        tokens, positions, _, mask = state.window(at, self.size)

        # x_theta(z_t): one call on the canvas. The denoiser is not told the time, so each row keeps
        # its own.
        out = self.network.forward(params, tokens, positions, None, mask)
        state = state.spend(out.counts, state.rows.limit)
        state, info, _ = self.unmask(params, state, out.hidden, at, state.groups, knobs)
        return state, info
