"""Who is revealed in a block, and as what: the remasking rules of SDAR and Fast-dLLM.

For each masked position a token x is drawn, after temperature, top-k and top-p. Its confidence c is its probability
after the temperature alone, H the entropy of that distribution. With q the quota of the step::

    static       the q surest, by c                                            (SDAR)
    dynamic      all with c > tau, or the q surest where those are fewer        (SDAR)
    sequential   the q leftmost                                                (SDAR)
    random       q at random                                                   (JetEngine)
    entropy      the lowest H as long as their sum is below gamma, at least one (JetEngine)
    threshold    all with c >= tau, and the surest                             (Fast-dLLM, arXiv 2505.22618)
    factor       the r surest as long as c_r >= 1 - f / (r + 1), at least one   (Fast-dLLM)

Ties go to the lower position. `choose` is the law of a decoder's step, a pure function: the same logits, state, step
and keys give the same answer, whoever asks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.knobs import UNLIMITED, SamplingKnobs, check_range, knob
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules import reveal, score
from paradec_jax.decode.rules.by_age import Scheduled, at_age
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import sample, tempered
from paradec_jax.decode.rules.subs import without_mask

QUOTAS = ("static", "dynamic", "sequential", "random")
RULES = (*QUOTAS, "entropy", "threshold", "factor")
THRESHOLD, GAMMA, FACTOR = 0.9, 0.35, 1.0  # where the knob is not set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenoisingKnobs(SamplingKnobs):
    """Sampling, and how much a step reveals.

    Attributes:
      steps: S, steps of a block of B positions: each reveals B // S of them, the first B mod S one more. At most B;
        None is B, one position a step.
      threshold: tau, the confidence from which a position is revealed, or one for each step of a block, [K]; the last
        one holds for all later steps, those of a head among them. None is 0.9.
      entropy: gamma, nats that the positions of a step may have together; None is 0.35.
      factor: f; None is 1.
    """

    steps: Int[Array, ""] | int | None = knob(None, unset=UNLIMITED, needs=("rule", QUOTAS))
    threshold: Scheduled | None = knob(None, unset=THRESHOLD, needs=("rule", ("dynamic", "threshold")))
    entropy: Float[Array, ""] | float | None = knob(None, unset=GAMMA, needs=("rule", ("entropy",)))
    factor: Float[Array, ""] | float | None = knob(None, unset=FACTOR, needs=("rule", ("factor",)))

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        super().check()
        check_range(self.steps, "steps", lambda x: x >= 1, "at least 1")
        for name in ("threshold", "entropy", "factor"):
            check_range(getattr(self, name), name, lambda x: x >= 0, "at least 0")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """What a step does to a block.

    Attributes:
      where: positions that it reveals, [B, W].
      tokens: what stands at every position, [B, W]; only that of revealed ones counts.
      scores: their confidences c, [B, W].
    """

    where: Bool[Array, "B W"]
    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]


def draw(
    decoder: Any,
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    step: Int[Array, "B"],
    rows: Rows,
    knobs: DenoisingKnobs,
) -> Int[Array, "B W"]:
    """A token for each position, never the mask; arguments are those of `choose`."""
    logits = without_mask(logits, decoder.mask)
    if decoder.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    uniforms = None if rows.recorded is None else rows.recorded.uniforms
    return sample(logits, positions, rows.keys, knobs, uniforms, top_p_rule=decoder.top_p_rule, step=step)


def quota(block: int | Int[Array, "B"], step: Int[Array, "B"], knobs: DenoisingKnobs) -> Int[Array, "B"]:
    """q, how many of a block's positions step `step` reveals, however many are masked."""
    steps = jnp.minimum(block if knobs.steps is None else knobs.steps, block)
    return reveal.share(jnp.full_like(step, block), steps, step)


def threshold_at(step: Int[Array, "B"], knobs: DenoisingKnobs) -> Array:
    """tau at each row's step: a number, or [B, 1]."""
    bound = at_age(THRESHOLD if knobs.threshold is None else knobs.threshold, step)
    return bound if bound.ndim == 0 else bound[:, None]


def select(
    rule: str,
    logits: Float[Array, "B W V"],
    scores: Float[Array, "B W"],
    masked: Bool[Array, "B W"],
    positions: Int[Array, "B W"],
    step: Int[Array, "B"],
    keys: Array,
    knobs: DenoisingKnobs,
    block: Int[Array, "B"] | None = None,
) -> Bool[Array, "B W"]:
    """The positions that a rule reveals, given the confidence of each position's token; see `choose`."""
    if rule == "entropy":
        entropies = score.entropy(tempered(logits, knobs.temperature))
        return reveal.entropy_budget(entropies, masked, GAMMA if knobs.entropy is None else knobs.entropy)
    if rule == "factor":
        return reveal.factor(scores, masked, FACTOR if knobs.factor is None else knobs.factor)
    bound = threshold_at(step, knobs)
    if rule == "threshold":
        return reveal.threshold(scores, masked, bound)
    count = quota(masked.shape[1] if block is None else block, step, knobs)
    if rule == "sequential":
        return reveal.in_order(masked, count)
    if rule == "random":
        return reveal.quota(score.random(fold(keys, Purpose.REVEAL, positions, step)), masked, count)
    surest = reveal.quota(scores, masked, count)
    if rule == "static":
        return surest
    return surest | reveal.threshold(scores, masked, bound, strict=True, best=False)


def choose(
    decoder: Any,
    rule: str,
    logits: Float[Array, "B W V"],
    masked: Bool[Array, "B W"],
    positions: Int[Array, "B W"],
    step: Int[Array, "B"],
    rows: Rows,
    knobs: DenoisingKnobs,
    block: Int[Array, "B"] | None = None,
) -> Choice:
    """The positions that a step reveals and their tokens: pi of a decoder, given a block's state.

    Noise is folded by step and position, and the position says which block it is.

    Args:
      decoder: whose mask, which no position becomes, filters and greed count.
      rule: one of `RULES`.
      logits: of the token *at* each position of a block, W = B positions unless `block` says less.
      masked: positions that may be revealed.
      positions: absolute ones.
      step: index of the step in its block, counted along the states of the base decoder.
      rows: their keys draw, or their recorded numbers in place of the tokens' noise.
      knobs: the decoder's.
      block: positions of each row's block, where they are not all W.
    """
    tokens = draw(decoder, logits, positions, step, rows, knobs)
    scores = score.probability(tempered(logits, knobs.temperature), tokens)
    where = select(rule, logits, scores, masked, positions, step, rows.keys, knobs, block)
    return Choice(where, tokens, scores)
