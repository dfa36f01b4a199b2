"""Block denoising made differentiable: soft tokens, and soft reveals that a threshold has a
gradient through.

The step is that of `BlockDenoising`, with the same keys and so the same tokens. Which tokens are
drawn and who is revealed stay discrete and carry no gradient; two things beside them do. With c the
confidence of a masked position's token y, tau the threshold of the step, E the embedding, l the
logits and g Gumbel noise (0 at temperature 0)::

    gate     sigmoid((log(1 - tau) - log(1 - c)) / gate_temperature)     1 where the rule reveals whatever tau is
    m        1 - product of (1 - gate) over the position's steps         the share of it that is revealed
    q        softmax((log softmax(l / T) + g) / token_temperature)       of the newest step that found it masked
    v        m q E + (1 - m) E[mask]

    soft                v
    straight_through    sg(E[x] - v) + v        x the token on the canvas, the mask where it is masked

So gradients reach parameters, temperatures and thresholds through every call after a step. Of each
masked position::

    staying     product of (1 - gate) over its earlier steps       summed over steps: its expected number of steps
    leaving     staying gate, or all of staying in the step that reveals it

Over the steps of a position `leaving` sums to 1, so that `sum leaving * loss(hidden)` is the
expected loss of the position when it is revealed, and a loss may trade it for steps. As
gate_temperature goes to 0 both become what the discrete decoder does. Nothing is known of steps
after the reveal, so a higher threshold is only felt up to it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.reading import fresh, read_block, read_prompt
from paradec_jax.decode.canvas import (
    BlockCanvas,
    BlockDecoder,
    BlockRead,
    DenoisingKnobs,
    quota,
    threshold_at,
)
from paradec_jax.decode.machine import POSITIVE, Number, Request, given_offsets, knob
from paradec_jax.decode.rules import (
    RELAXATIONS,
    noisy,
    put,
    relaxed,
    select,
    window,
    without_mask,
    write_after_read,
)
from paradec_jax.records import choices, pytree

LEAST = 1e-6  # doubt below this is as good as none


@pytree
class SoftBlockKnobs(DenoisingKnobs):
    """Of `BlockDenoising`, and how soft its decisions are.

    Attributes:
      token_temperature: of the mixture that stands for a token, above 0.
      gate_temperature: width of the gate, in units of log doubt, above 0.
    """

    token_temperature: Number = knob(1.0, POSITIVE)
    gate_temperature: Number = knob(0.5, POSITIVE)


@pytree
class SoftBlockCanvas(BlockCanvas):
    """A canvas of blocks, and what is soft about its tokens.

    Attributes:
      offsets: what is added to the vector of each position's token, [B, S, D].
      survival: 1 - m, the share of each position that is not revealed, [B, S].
    """

    offsets: Float[Array, "B S D"]
    survival: Float[Array, "B S"]


@pytree
class SoftDenoised(Denoised):
    """What a call did, and the soft side of it, zero where no mask was read.

    Attributes:
      staying: share of each position that had not been revealed before, [B, W].
      leaving: share that left with the hidden state of this call, [B, W].
    """

    staying: Float[Array, "B W"]
    leaving: Float[Array, "B W"]


@choices
class SoftBlock(BlockDecoder):
    """`BlockDenoising` whose tokens and reveals carry gradients through `rollout`.

    With "straight_through" its tokens, lengths and counts are those of `BlockDenoising`. A loss
    over all steps wants `fuse_prompt=False`: what rides with the prompt is done by `init`, which
    hands out no info.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      rule: "dynamic" or "threshold".
      length, confidence, fuse_store, fuse_prompt, top_p_rule: as in `BlockDenoising`.
      relaxation: "straight_through" (what is read is a token, its gradient a mixture's) or "soft"
        (a mixture).
    """

    rule: str = "dynamic"
    relaxation: str = "straight_through"
    Knobs = SoftBlockKnobs
    rules = ("dynamic", "threshold")
    WORDS = {**BlockDecoder.WORDS, "relaxation": RELAXATIONS}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: SoftBlockKnobs) -> SoftBlockCanvas:
        """As `BlockDenoising`; the vectors of given positions are those of `SoftGiven`, or their
        tokens'.
        """
        hard, table = fresh(self, request), self.network.embedding(params)
        offsets = given_offsets(self, request, table, hard.shown)
        survival = jnp.ones(hard.shown.shape, jnp.promote_types(table.dtype, jnp.float32))
        state = SoftBlockCanvas(**vars(hard), offsets=offsets, survival=survival)
        vectors = table[state.rows.tokens] + state.offsets
        state, call = read_prompt(self, params, state, request, self.fuse_prompt, vectors)
        return self._advance(params, table, state, call, knobs)[0]

    def step(
        self, params: Any, state: SoftBlockCanvas, knobs: SoftBlockKnobs
    ) -> tuple[SoftBlockCanvas, SoftDenoised]:
        """One call on the relaxed vectors of each row's open block, or a store, or both."""
        table = self.network.embedding(params)
        vectors = table[state.rows.tokens] + state.offsets
        state, call = read_block(self, params, state, self.fuse_store, vectors)
        return self._advance(params, table, state, call, knobs)

    def _advance(
        self,
        params: Any,
        table: Array,
        state: SoftBlockCanvas,
        call: BlockRead,
        knobs: SoftBlockKnobs,
    ) -> tuple[SoftBlockCanvas, SoftDenoised]:
        """The rule's choice, the store, the reveal, and the relaxed vectors after them."""
        at, step, block = state.cached, state.step, self.block
        masked = state.masked(call.reads)
        new, logits, choice = self.denoise(params, state, call, knobs)
        info, new = Denoised.of(state, call, choice), new.with_choice(choice)

        # How far each position is past the threshold: 1/2 at it, 1 where it is revealed in any
        # case.
        count = 1 if self.rule == "threshold" else quota(block, step, knobs)
        free = select.top(choice.scores, masked, count)
        bound, doubt = 1 - threshold_at(step, knobs), 1 - choice.scores
        excess = jnp.log(jnp.maximum(bound, LEAST)) - jnp.log(jnp.maximum(doubt, LEAST))
        past = jnp.where(free, 1.0, jax.nn.sigmoid(excess / knobs.gate_temperature))
        gate = jnp.where(masked, past, 0.0)
        before = window(state.survival, at, block)
        staying = jnp.where(masked, before, 0.0)
        after = before * (1 - gate)
        scores = noisy(
            without_mask(logits, self.mask),
            at[:, None] + jnp.arange(block),
            state.rows.keys,
            knobs,
            top_p_rule=self.top_p_rule,
            greedy=self.greedy,
            step=step,
        )
        mixed = table[choice.tokens] + relaxed(
            table, scores, choice.tokens, knobs.token_temperature, "soft"
        )
        vectors = mixed + (after[..., None] * (table[self.mask] - mixed)).astype(table.dtype)
        offsets = vectors - table[window(new.rows.tokens, at, block)]
        if self.relaxation == "straight_through":
            offsets = offsets - lax.stop_gradient(offsets)
        leaving = staying * jnp.where(choice.where, 1.0, gate)
        place = write_after_read(at, choice.tokens)
        new = dataclasses.replace(
            new,
            offsets=put(new.offsets, offsets, place, masked),
            survival=put(new.survival, after, place, masked),
        )
        return new, SoftDenoised(**vars(info), staying=staying, leaving=leaving)
