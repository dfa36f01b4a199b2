"""The released program of self-verification, S2D2's `SDAR/generate_ssd_policy.py`."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.replicas.block_diffusion import revealed_late, whole_blocks
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.reading import ask_verifier, fresh, read_block, read_prompt
from paradec_jax.decode.block.self_verified import (
    SelfVerifiedCanvas,
    SelfVerifiedKnobs,
    routed,
    worth,
)
from paradec_jax.decode.canvas.choose import THRESHOLD, RuledDecoder, quota, threshold_at
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, Number, knob
from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.decode.rules import score, select, speculate
from paradec_jax.decode.rules.randomness import Purpose, uniform_at
from paradec_jax.decode.rules.sampling import (
    filtered_probabilities,
    inverse_cdf,
    is_hot,
    tempered,
)
from paradec_jax.decode.rules.windows import window

ESTIMATORS = ("entropy", "margin", "renyi", "power")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedVerifications(RecordedDraws):
    """Recorded numbers of each draft call of a row.

    Attributes:
      drafts: number that draws the token at each position, [B, n, W].
      accepts: number by which the draft at each position is accepted, [B, n, W].
      residuals: number that draws in the place of the first refused draft, [B, n].
    """

    drafts: Float[Array, "B n W"] | None = None
    accepts: Float[Array, "B n W"] | None = None
    residuals: Float[Array, "B n"] | None = None
    per_row: ClassVar[tuple[str, ...]] = ("drafts", "accepts", "residuals")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedVerifiedKnobs(SelfVerifiedKnobs):
    """Of `SelfVerified`, and numbers of further settings.

    Attributes:
      threshold: tau, whatever the rule is: the routing counts what exceeds it.
      ratio: chance from which drafts after a refusal are revealed, too; None reveals none.
      margin: difference of the two largest probabilities from which a draft counts as accepted.
      power: exponent of the confidence that stands for a draft's chance.
    """

    threshold: Number | None = knob(None, NOT_NEGATIVE, unset=THRESHOLD)
    ratio: Number | None = knob(None, NOT_NEGATIVE, unset=jnp.inf)
    margin: Number | None = knob(None, unset=0.05, needs=("estimator", ("margin",)))
    power: Number | None = knob(None, NOT_NEGATIVE, unset=1.0, needs=("estimator", ("power",)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedVerifiedCanvas(SelfVerifiedCanvas):
    """As of `SelfVerified`, and what the program keeps of earlier calls.

    Attributes:
      drafted: draft calls so far, [B].
      lead: positions before the first mask in the last draft call on the block, [B].
    """

    drafted: Int[Array, "B"]
    lead: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedJudgement:
    """What a step did; leaves about positions are [B, W].

    Attributes:
      at: first position of the block, [B].
      reads, stored: rows that drafted, and that stored their block, [B].
      before: tokens of the block before the step.
      draft, confidence: drafted tokens and their probabilities.
      sees: which positions of the block each one saw in the draft or store call, [B, W, W].
      span: the first run of masks.
      value: score of the routing, [B].
      verifies: rows that were verified, [B].
      judged: the verifier's probability of each draft.
      chance: `min(1, (q / p)^t)`.
      accepted, refused: drafts that were accepted, and the first that was not.
      tokens, where: what was revealed, and where.
      logits, verifier: logits of the draft and of the verifier, [B, W, V].
      rest: `(q - p)+` at the first refusal, renormalised, [B, 1, V].
    """

    at: Int[Array, "B"]
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    before: Int[Array, "B W"]
    draft: Int[Array, "B W"]
    confidence: Float[Array, "B W"]
    sees: Bool[Array, "B W W"]
    span: Bool[Array, "B W"]
    value: Float[Array, "B"]
    verifies: Bool[Array, "B"]
    judged: Float[Array, "B W"]
    chance: Float[Array, "B W"]
    accepted: Bool[Array, "B W"]
    refused: Bool[Array, "B W"]
    tokens: Int[Array, "B W"]
    where: Bool[Array, "B W"]
    logits: Float[Array, "B W V"]
    verifier: Float[Array, "B W V"]
    rest: Float[Array, "B 1 V"]


@dataclasses.dataclass(frozen=True)
class ReleasedVerified(RuledDecoder):
    """Drafts and verifies as `SelfVerified`, with what the program does otherwise:

    - Nothing is greedy. A draft that is not `sampled` is the most probable token, but it is accepted
      with its probability, and a refusal draws; temperature 0 is temperature 1.
    - The mask may be drawn and has its share in all probabilities.
    - What a step's verification reveals less than the quota, the ordinary rule adds.
    - With `causal_draft` the store call of a block sees as its last draft call did.
    - A block is stored by a call of its own. Rows end where a block is stored, and fill the block
      that holds the end of their budget.

    A row of n new positions ends within 1 + 3 (n + B) network calls.

    Attributes:
      length: positions of a block; the checkpoint's when None.
      rule: "static", "dynamic" or "sequential".
      route: "span" or "score".
      estimator: what stands for the chance of a draft: exp(-H / ln V) ("entropy"), 1 where the two
        largest probabilities differ enough ("margin"), the sum of p^2 ("renyi"), or a power of the
        confidence ("power").
      sampled: draw drafts at temperatures above 0.
      resample: draw a token in the place of the first refused draft, which is revealed otherwise.
      all_spans: compare chances with the knob `ratio` in all runs of masks.
      extras: reveal what exceeds the threshold after a verification.
      causal: read prompts and store blocks token-causally.
      causal_draft: positions before the first mask are read token-causally in draft calls.
    """

    _: dataclasses.KW_ONLY
    length: int | None = None
    rule: str = "dynamic"
    route: str = "span"
    estimator: str = "margin"
    sampled: bool = False
    resample: bool = True
    all_spans: bool = False
    extras: bool = False
    causal: bool = False
    causal_draft: bool = False
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = ReleasedVerifiedKnobs
    alignments: ClassVar[tuple[str, ...]] = ("own",)

    def __post_init__(self) -> None:
        check_words(self, rule=("static", "dynamic", "sequential"), estimator=ESTIMATORS)
        check_words(self, route=("span", "score"))
        if self.greedy or self.log_probs:
            raise ValueError("ReleasedVerified always draws and keeps no log-probabilities")

    def init(
        self, params: Any, request: Request, knobs: ReleasedVerifiedKnobs
    ) -> ReleasedVerifiedCanvas:
        """Reads the prompts' whole blocks."""
        del knobs
        state = SelfVerifiedCanvas.of_blocks(whole_blocks(fresh(self, request, overrun=self.block)))
        state, call = read_prompt(self, params, state, request, opens=False, causal=self.causal)
        state = state.store(self.network, call, state.rows.tokens)
        never = jnp.zeros_like(state.cached)
        return ReleasedVerifiedCanvas(**vars(state), drafted=never, lead=never)

    def step(
        self, params: Any, state: ReleasedVerifiedCanvas, knobs: ReleasedVerifiedKnobs
    ) -> tuple[ReleasedVerifiedCanvas, ReleasedJudgement]:
        """A draft in each row's block, perhaps verified, or the block's store."""
        at, clean, block, step = state.cached, state.clean, self.block, state.step
        before, index = window(state.rows.tokens, at, block), jnp.arange(block)
        open_ = window(state.open, at, block)
        # The mask of the draft call is changed in place, so that the store call inherits it.
        lead = jnp.where(clean, state.lead, jnp.argmax(open_, axis=1)) * self.causal_draft
        causal = (index < lead[:, None]) | (clean & self.causal)[:, None]
        state, call = read_block(self, params, state, fuse=False, causal=causal)
        masked = state.masked(call.reads)

        # Draft, from probabilities in which the mask has its share.
        logits = self.network.logits(params, call.hidden)
        p = filtered_probabilities(logits, knobs, top_p_rule=self.top_p_rule)
        uniforms = self._uniforms(state, at)
        draft = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.sampled:
            drawn = inverse_cdf(p, uniforms["drafts"])
            draft = jnp.where(is_hot(knobs.temperature), drawn, draft)
        confidence = speculate.share(p, draft)
        state = state.store(self.network, call, draft)

        # Routing, verification and resampling.
        span, sure = select.first_run(masked), masked & (confidence > threshold_at(step, knobs))
        value, verifies = self._route(logits, confidence, span, sure, state.verified, knobs)
        state, verifier = ask_verifier(self, params, state, draft, verifies)
        q = filtered_probabilities(verifier, knobs, top_p_rule=self.top_p_rule)
        asked = verifies[:, None]
        chance, accepted, refused, rest = speculate.judge(
            p, q, draft, span & asked, knobs.exponent, uniforms["accepts"]
        )
        tokens = draft
        if self.resample:
            tokens = jnp.where(refused, inverse_cdf(rest, uniforms["residuals"]), draft)
        judged = (masked if self.all_spans else span) & asked
        ratio = jnp.inf if knobs.ratio is None else knobs.ratio
        where = accepted | refused | (judged & (chance >= ratio))
        where |= sure & asked & self.extras

        # The ordinary rule adds what is missing of the quota.
        left = masked & ~where
        missing = quota(block, step, knobs) - jnp.sum(where, axis=1, dtype=jnp.int32)
        if self.rule == "sequential":
            more = select.first(left, missing)
        else:
            more = select.top(confidence, left, missing)
        if self.rule == "dynamic":
            enough = jnp.sum(left & sure, axis=1) >= missing
            more = jnp.where((enough & (missing > 0))[:, None], left & sure, more)
        where |= more

        sees = (index <= index[:, None]) | ~causal[..., None]
        info = ReleasedJudgement(
            at,
            call.reads,
            call.stored,
            before,
            draft,
            confidence,
            sees,
            span,
            value,
            verifies,
            speculate.share(q, draft),
            chance,
            accepted,
            refused,
            tokens,
            where,
            logits,
            verifier,
            rest,
        )
        state = dataclasses.replace(
            state,
            verified=jnp.where(call.reads, verifies, state.verified),
            drafted=state.drafted + call.reads,
            lead=lead,
        )
        return revealed_late(state, tokens, where, at, call.stored), info

    def _uniforms(self, state: ReleasedVerifiedCanvas, at: Int[Array, "B"]) -> dict[str, Array]:
        """Numbers of the row's next draft call, recorded ones in the place of the keys' own."""
        positions, numbers = at[:, None] + jnp.arange(self.block), {}
        for name, of, places in (
            ("drafts", Purpose.TOKEN, positions),
            ("accepts", Purpose.ACCEPT, positions),
            ("residuals", Purpose.RESIDUAL, at[:, None]),
        ):
            given = getattr(state.rows.recorded, name, None)
            if given is None:
                numbers[name] = uniform_at(state.rows.keys, of, places, state.drafted)
            else:
                of_call = jnp.minimum(state.drafted, given.shape[1] - 1)
                numbers[name] = jax.vmap(lambda x, call: x[call])(given, of_call).reshape(
                    places.shape
                )
        return numbers

    def _route(
        self,
        logits: Float[Array, "B W V"],
        confidence: Float[Array, "B W"],
        span: Bool[Array, "B W"],
        sure: Bool[Array, "B W"],
        verified: Bool[Array, "B"],
        knobs: Any,
    ) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
        """The score of each row, and whether it is verified."""
        if self.route == "span":
            value = jnp.sum(span, axis=1, dtype=jnp.float32)
            return value, (value > 0) & (value >= knobs.span)
        scaled, vocab = tempered(logits, knobs.temperature), jnp.log(logits.shape[-1])
        if self.estimator == "entropy":
            alpha = jnp.exp(-knobs.decline * score.entropy(scaled) / vocab)
        elif self.estimator == "margin":
            alpha = (score.margin(scaled) >= knobs.margin).astype(jnp.float32)
        elif self.estimator == "renyi":
            alpha = jnp.sum(jnp.square(jax.nn.softmax(scaled, axis=-1)), axis=-1)
        else:
            alpha = confidence**knobs.power
        value = worth(alpha, span, sure, knobs)
        return value, routed(value, verified, knobs) & jnp.any(span, axis=1)
