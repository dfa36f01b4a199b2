"""Which positions of a block are revealed, and as what: the remasking rules of SDAR, JetEngine and
Fast-dLLM.

For each masked position a token x is drawn, after temperature, top-k and top-p. Its confidence c is
its probability, H the entropy, in the distribution that `confidence` names (see
`rules.score.shaped`). With q the quota of the step::

    static       the q surest, by c                                             tempered   SDAR
    dynamic      all with c > tau, or the q surest where those are fewer         tempered   SDAR
    sequential   the q leftmost                                                 tempered   SDAR
    random       q at random                                                    tempered   JetEngine
    entropy      the lowest H as long as their sum is below gamma, at least one  tempered   JetEngine
    threshold    all with c >= tau, and the surest                              raw        Fast-dLLM (2505.22618)
    factor       the r surest as long as c_r >= 1 - f / (r + 1), at least one    raw        Fast-dLLM
    certain      all with H <= gamma, and the lowest                             raw        d3LLM (2601.07568)

Ties go to the lower position.
"""

import abc
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_words
from paradec_jax.decode.canvas.blocks import AnyBlocks, BlockRead
from paradec_jax.decode.canvas.canvas import Choice
from paradec_jax.decode.machine import (
    COUNT,
    NOT_NEGATIVE,
    UNLIMITED,
    DecoderBase,
    Number,
    Rows,
    SamplingKnobs,
    Scheduled,
    Whole,
    at_age,
    check_range,
    knob,
)
from paradec_jax.decode.rules import Purpose, reveal, score, select, uniform_at, without_mask
from paradec_jax.records import choices, pytree

QUOTAS = ("static", "dynamic", "sequential", "random")
TAKEN_FROM = {
    **dict.fromkeys((*QUOTAS, "entropy"), "tempered"),
    **dict.fromkeys(("threshold", "factor", "certain"), "raw"),
}
SUMS = ("entropy", "factor")  # rules about positions together
RULES = tuple(TAKEN_FROM)
THRESHOLD, GAMMA, FACTOR = 0.9, 0.35, 1.0  # where the knob is not set


@pytree
class DenoisingKnobs(SamplingKnobs):
    """Sampling, and how much a step reveals.

    Attributes:
      steps: S, steps of a block of B positions: each reveals B // S of them, the first B mod S one
        more. At most B; None is B, one position a step.
      threshold: tau, the confidence from which a position is revealed, or one for each step of a
        block, [K]; the last one holds for all later steps, those of a head among them. None is 0.9.
      entropy: gamma, nats that the positions of a step may have together, or each of them by rule
        "certain"; None is 0.35.
      factor: f; None is 1.
    """

    steps: Whole | None = knob(None, COUNT, unset=UNLIMITED, needs=("rule", QUOTAS))
    threshold: Scheduled | None = knob(
        None, NOT_NEGATIVE, unset=THRESHOLD, needs=("rule", ("dynamic", "threshold"))
    )
    entropy: Number | None = knob(
        None, NOT_NEGATIVE, unset=GAMMA, needs=("rule", ("entropy", "certain"))
    )
    factor: Number | None = knob(None, NOT_NEGATIVE, unset=FACTOR, needs=("rule", ("factor",)))


def quota(
    block: int | Int[Array, "B"], step: Int[Array, "B"], knobs: DenoisingKnobs
) -> Int[Array, "B"]:
    """q, how many of a block's positions step `step` reveals, however many are masked."""
    steps = jnp.minimum(block if knobs.steps is None else knobs.steps, block)
    return reveal.share(jnp.full_like(step, block), steps, step)


def threshold_at(step: Int[Array, "B"], knobs: DenoisingKnobs) -> Array:
    """tau at each row's step: a number, or [B, 1]."""
    bound = at_age(THRESHOLD if knobs.threshold is None else knobs.threshold, step)
    return bound if bound.ndim == 0 else bound[:, None]


@choices
class RuledDecoder(DecoderBase):
    """A decoder that reveals positions of blocks by a rule; an abstract base without fields."""

    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order = True

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """One of `RULES`."""

    @property
    def confidence(self) -> str | None:
        """Distribution that confidences are taken from; None is that of the rule's paper."""
        return None

    @property
    def block(self) -> int:
        """B, a fact of the checkpoint or chosen among those that it serves."""
        return block_of(self, getattr(self, "length", None))

    @property
    def origin(self) -> str:
        """Where blocks count from, as of `Canvas`, a fact of the checkpoint."""
        return getattr(self.network, "origin", "start")

    def shaped(self, logits: Float[Array, "B W V"], knobs: DenoisingKnobs) -> Float[Array, "B W V"]:
        """Logits of the distribution that confidences and entropies are taken from, the mask's
        share included.
        """
        confidence = self.confidence or TAKEN_FROM[self.rule]
        return score.shaped(logits, confidence, knobs, top_p_rule=self.top_p_rule)

    def choose(
        self,
        logits: Float[Array, "B W V"],
        masked: Bool[Array, "B W"],
        at: Int[Array, "B"],
        step: Int[Array, "B"],
        rows: Rows,
        knobs: DenoisingKnobs,
        *,
        rule: str | None = None,
        block: Int[Array, "B"] | None = None,
        best: Bool[Array, "B"] | bool = True,
    ) -> Choice:
        """The positions that a step reveals and their tokens: pi of the decoder, given a block's
        state.

        A pure function: equal logits, state, step and keys give an equal choice, in a draft as in
        the base decoder.

        Args:
          logits: scores of the token *at* each position, W = B positions unless `block` says less.
          masked: positions that may be revealed.
          at: first position of the block.
          step: index of the step in its block, counted along the states of the base decoder.
          rows: keys of the draws, or recorded numbers in their place.
          knobs: knobs of the decoder.
          rule: another rule than the decoder's.
          block: positions of each row's block, where they are not all W.
          best: rows that reveal the surest where none passes a threshold; the others reveal what
            passes, by a rule without a threshold nothing.
        """
        rule = rule or self.rule
        # A token for each position, never the mask. Its noise belongs to step and position, which
        # names the block.
        positions = at[:, None] + jnp.arange(masked.shape[1])
        likely = without_mask(logits, self.mask)
        tokens = self.sample(likely, positions, rows, knobs, step=step)
        shaped = self.shaped(logits, knobs)
        scores = score.probability(shaped, tokens)

        if rule in ("entropy", "certain"):
            gamma, entropy = (
                GAMMA if knobs.entropy is None else knobs.entropy,
                score.entropy(shaped),
            )
            if rule == "certain":
                where = reveal.threshold(-entropy, masked, -gamma, best=best)
            else:
                where = reveal.entropy_budget(entropy, masked, gamma)
        elif rule == "factor":
            where = reveal.factor(scores, masked, FACTOR if knobs.factor is None else knobs.factor)
        elif rule == "threshold":
            where = reveal.threshold(scores, masked, threshold_at(step, knobs), best=best)
        else:
            count = quota(masked.shape[1] if block is None else block, step, knobs) * best
            if rule == "sequential":
                where = select.first(masked, count)
            elif rule == "random":
                order = uniform_at(rows.keys, Purpose.REVEAL, positions, step)
                where = select.top(order, masked, count)
            else:
                where = select.top(scores, masked, count)
            if rule == "dynamic":
                where |= reveal.threshold(
                    scores, masked, threshold_at(step, knobs), strict=True, best=False
                )
        if rule in SUMS:
            where &= jnp.reshape(jnp.asarray(best), (-1, 1))
        return Choice(where, tokens, scores, self.scores(likely, tokens))

    def denoise(
        self, params: Any, state: AnyBlocks, call: BlockRead, knobs: DenoisingKnobs
    ) -> tuple[AnyBlocks, Array, Choice]:
        """The step in the open block that a call's hidden states make, not taken yet.

        Args:
          params: parameters of the network.
          state: the canvas as the call left it.
          call: what was read.
          knobs: knobs of the decoder.

        Returns:
          The canvas with the call's keys, which are trusted of a block without masks alone, past
          which `cached` has moved; logits [B, W, V]; the choice.
        """
        logits = self.network.logits(params, state.aligned(call.hidden))
        choice = self.choose(
            logits, state.masked(call.reads), state.cached, state.step, state.rows, knobs
        )
        return state.store(self.network, call, choice.tokens), logits, choice


@choices
class BlockDecoder(RuledDecoder):
    """What decoders of blocks share; `BlockDenoising` says what the fields mean."""

    length: int | None = None
    confidence: str | None = None
    fuse_store: bool = True
    fuse_prompt: bool = True
    top_p_rule: str = "keep-renormalised"
    rules = RULES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, rule=self.rules)
        score.check_confidence(self)

    def knobs(self, knobs: Any) -> Any:
        """As of every decoder; more steps than a block has positions are refused, too."""
        knobs, most = super().knobs(knobs), self.block
        check_range(
            knobs.steps,
            "steps",
            lambda n: (n <= most) | (n == UNLIMITED),
            f"at most the block's {most}",
        )
        return knobs


def block_of(decoder: Any, length: int | None = None) -> int:
    """B of a decoder's network, or another length that its checkpoint serves.

    Raises:
      ValueError: a network that does not see in blocks, or a length that it does not serve.
    """
    network = decoder.network
    if network.block is None:
        raise ValueError(
            f"{type(decoder).__name__} decodes networks of visibility 'block', but this one's is "
            f"{network.visibility!r}"
        )
    served = getattr(network, "blocks", (network.block,))
    length = network.block if length is None else length
    if length not in served:
        raise ValueError(
            f"the checkpoint serves blocks of {', '.join(map(str, served))}, as it was trained, not of {length}"
        )
    return length
