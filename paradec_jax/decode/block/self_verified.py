"""Self-verification (S2D2, arXiv 2603.25702): a block model drafts, and judges itself as a model of
block length one. It needs no training.

::

    canvas      a _ _ _       S, the first run of masks: positions 1 to 3
    draft       . b c d       x ~ p, the block seen whole
    verifier    . _ _ _       q, each position given those before it: a, then a b, then a b c
    canvas      a b e _       b accepted with min(1, q / p), c refused, e ~ (q - p)+
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.reading import ask_verifier, fresh, read_block, read_prompt
from paradec_jax.decode.canvas import (
    BlockCanvas,
    BlockDecoder,
    BlockRead,
    Choice,
    DenoisingKnobs,
    threshold_at,
)
from paradec_jax.decode.machine import COUNT, NOT_NEGATIVE, Number, Request, Whole, knob
from paradec_jax.decode.rules import (
    Purpose,
    distribution,
    draw,
    fold,
    score,
    select,
    speculate,
    uniform_at,
    where_rows,
    without_mask,
)
from paradec_jax.records import choices, pytree

BY_SCORE = ("route", ("score",))


@pytree
class SelfVerifiedKnobs(DenoisingKnobs):
    """Of `BlockDenoising`, how strict the verifier is, and when it is asked.

    Attributes:
      exponent: t of the chance min(1, (q / p)^t) that a draft is accepted; 1 keeps the law of q.
      span: masks that the first run has at least where it is verified; None is 1, always.
      verify_from: score from which a row's steps are verified; None is 0.
      verify_until: score down to which they stay verified (hysteresis), at most `verify_from`; None
        is `verify_from`.
      price: c, what a call of the verifier costs in accepted tokens; None is 1.
      price_each: what it costs for each mask above the threshold, which a step reveals without it;
        None is 0.
      decline: beta of alpha = exp(-beta H / ln V), the chance that a draft of entropy H is thought
        to have; None is 1.
    """

    exponent: Number = knob(1.0, NOT_NEGATIVE)
    span: Whole | None = knob(None, COUNT, unset=1, needs=("route", ("span",)))
    verify_from: Number | None = knob(None, unset=0.0, needs=BY_SCORE)
    verify_until: Number | None = knob(None, unset=jnp.inf, needs=BY_SCORE)
    price: Number | None = knob(None, NOT_NEGATIVE, unset=1.0, needs=BY_SCORE)
    price_each: Number | None = knob(None, NOT_NEGATIVE, unset=0.0, needs=BY_SCORE)
    decline: Number | None = knob(None, NOT_NEGATIVE, unset=1.0, needs=BY_SCORE)


@pytree
class SelfVerifiedCanvas(BlockCanvas):
    """A canvas of blocks, and whether each row's last step was verified, [B]."""

    verified: Bool[Array, "B"]

    @classmethod
    def of_blocks(cls, canvas: BlockCanvas) -> "SelfVerifiedCanvas":
        """A fresh canvas, no step of which was verified."""
        return cls(**vars(canvas), verified=jnp.zeros_like(canvas.cached, bool))


@pytree
class Judged:
    """What a round did to a block of each row.

    Attributes:
      at, step: first position of the block and steps done in it before, [B].
      reads, stored: rows of which a block with masks was read, and whose block before was stored.
      draft: x, its confidence, and what the threshold rule would have revealed.
      span: S, the first run of masks, [B, W].
      value: what S is thought to be worth, or its length, [B].
      verifies: rows that asked the verifier, [B].
      chance: min(1, (q / p)^t) of each draft, [B, W].
      accepted: drafts that were accepted, [B, W].
      refused: the first that was not, [B, W].
      choice: what was revealed, and as what.
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    draft: Choice
    span: Bool[Array, "B W"]
    value: Float[Array, "B"]
    verifies: Bool[Array, "B"]
    chance: Float[Array, "B W"]
    accepted: Bool[Array, "B W"]
    refused: Bool[Array, "B W"]
    choice: Choice


@choices
class SelfVerified(BlockDecoder):
    """Drafts a block in one call and, where that is thought to pay, verifies its first run of masks
    in another one.

    A row that is not verified does the step of `BlockDenoising` with rule "dynamic". Where all are
    (route "span" with its default), with exponent 1, token-causal stores and without `extras`, texts
    have the law of the same network read in blocks of one position, at temperature 0 its greedy
    text.

    A row of n new positions ends within 1 + 3 (n + B) network calls.

    Attributes:
      length, confidence, fuse_store, fuse_prompt, top_p_rule: fields of `BlockDenoising`.
      route: what is verified: runs of at least so many masks ("span"), or those of which more is
        thought to be accepted than the call costs ("score").
      extras: reveal other positions of a verified row that exceed the threshold, too.
      causal: read prompts and store blocks token-causally, as the verifier sees drafts. A checkpoint
        of longer blocks was not trained for that.
    """

    route: str = "span"
    extras: bool = False
    causal: bool = False
    rule = "dynamic"
    Knobs = SelfVerifiedKnobs
    WORDS = {**BlockDecoder.WORDS, "route": ("span", "score")}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: SelfVerifiedKnobs) -> SelfVerifiedCanvas:
        """Reads the prompts' whole blocks; with `fuse_prompt` that call drafts the first round."""
        state = SelfVerifiedCanvas.of_blocks(fresh(self, request))
        opens = self.fuse_prompt
        state, call = read_prompt(self, params, state, request, opens, causal=self.causal)
        return self._round(params, state, call, knobs)[0]

    def step(
        self, params: Any, state: SelfVerifiedCanvas, knobs: SelfVerifiedKnobs
    ) -> tuple[SelfVerifiedCanvas, Judged]:
        """One round in each row's open block: a draft and, where that pays, its verification."""
        # The call that stores a complete block drafts the next one.
        causal = jnp.repeat(state.clean[:, None], self.block, axis=1) if self.causal else None
        state, call = read_block(self, params, state, self.fuse_store, causal=causal)
        return self._round(params, state, call, knobs)

    def _round(
        self, params: Any, state: SelfVerifiedCanvas, call: BlockRead, knobs: SelfVerifiedKnobs
    ) -> tuple[SelfVerifiedCanvas, Judged]:
        at, step, masked = state.cached, state.step, state.masked(call.reads)
        # Draft: x ~ p at every mask, the block seen whole.
        state, logits, draft = self.denoise(params, state, call, knobs)
        # Is S, the first run of masks, worth a call of the verifier?
        span, sure = select.first_run(masked), masked & (draft.scores > threshold_at(step, knobs))
        value, verifies = self._route(logits, span, sure, state.verified, knobs)
        # q: each position given the drafts before it alone.
        state, judged = ask_verifier(self, params, state, draft.tokens, verifies)
        likely = [without_mask(x, self.mask) for x in (logits, judged)]
        p, q = (distribution(x, knobs, self.top_p_rule, self.greedy) for x in likely)
        # From left to right, x is accepted with min(1, (q / p)^t) ...
        positions = at[:, None] + jnp.arange(self.block)
        uniforms = uniform_at(state.rows.keys, Purpose.ACCEPT, positions, step)
        chance, accepted, refused, rest = speculate.judge(
            p, q, draft.tokens, span & verifies[:, None], knobs.exponent, uniforms
        )
        # ... and in the place of the first one that is not a token is drawn from (q - p)+.
        place = at + jnp.argmax(refused, axis=1)
        other = self._redraw(rest, place[:, None], state.rows.keys, step)
        tokens = jnp.where(refused, other, draft.tokens)
        where = accepted | refused | (sure & self.extras)
        # A row that is not verified does the threshold rule's step.
        found = Choice(where, tokens, speculate.share(q, tokens), self.scores(likely[1], tokens))
        choice = where_rows(verifies, found, draft)
        asked = at, step, call.reads, call.stored, draft, span, value, verifies
        info = Judged(*asked, chance, accepted, refused, choice)
        verified = jnp.where(call.reads, verifies, state.verified)
        return dataclasses.replace(state, verified=verified).with_choice(choice), info

    def _route(
        self,
        logits: Float[Array, "B W V"],
        span: Bool[Array, "B W"],
        sure: Bool[Array, "B W"],
        verified: Bool[Array, "B"],
        knobs: Any,
    ) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
        """What the verification of a span is thought to be worth, and whether it is asked for."""
        if self.route == "span":
            value = jnp.sum(span, axis=1, dtype=jnp.float32)
            return value, (value > 0) & (value >= knobs.span)
        # alpha = exp(-beta H / ln V), as the chance that a draft is accepted
        entropy = score.entropy(self.shaped(logits, knobs))
        alpha = jnp.exp(-knobs.decline * entropy / jnp.log(logits.shape[-1]))
        value = worth(alpha, span, sure, knobs)
        return value, routed(value, verified, knobs) & jnp.any(span, axis=1)

    def _redraw(
        self,
        rest: Float[Array, "B 1 V"],
        place: Int[Array, "B 1"],
        keys: Array,
        step: Int[Array, "B"],
    ) -> Int[Array, "B 1"]:
        """A token of what the acceptance left of q; at temperature 0 that is one token's."""
        if self.greedy:
            return jnp.argmax(rest, axis=-1).astype(jnp.int32)
        return draw(rest, fold(keys, Purpose.RESIDUAL, place, step))


def worth(
    chances: Float[Array, "B W"],
    span: Bool[Array, "B W"],
    sure: Bool[Array, "B W"],
    knobs: Any,
) -> Float[Array, "B"]:
    """`E - c - c' n`: accepted tokens that a verification is expected to bring, less its price.

    E is `speculate.expected_run` of the drafts' chances in the span, n the number of positions that
    are sure without it, c `price` and c' `price_each`.
    """
    expected = speculate.expected_run(chances, span)
    return expected - knobs.price - knobs.price_each * jnp.sum(sure, axis=1)


def routed(value: Float[Array, "B"], verified: Bool[Array, "B"], knobs: Any) -> Bool[Array, "B"]:
    """Rows that are verified: from `verify_from` on, after a verified step down to `verify_until`."""
    low = jnp.minimum(knobs.verify_until, knobs.verify_from)
    return value >= jnp.where(verified, low, knobs.verify_from)
