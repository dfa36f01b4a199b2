"""The masked sampler made differentiable: revealed tokens that the next calls read as relaxed
vectors.

The step is that of `Masked`, with the same keys and so the same tokens. Who is revealed and which
token is committed stay discrete and carry no gradient; the vector that later calls read of a
revealed position does. With l its logits, T the temperature, g the Gumbel noise that draws its
token y, and E the embedding::

    q                   softmax((log softmax(l / T) + g) / tau)      a Gumbel-softmax sample (arXiv 1611.01144)
    soft                q E
    straight_through    sg(E[y] - q E) + q E                         forward E[y], backward q E

So gradients reach the parameters, T and tau through every call after the reveal. Given positions
may be vectors instead of tokens (`SoftGiven`), and gradients reach those too.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.decode.machine import POSITIVE, Number, Request, given_offsets, knob
from paradec_jax.decode.masked.masked import (
    MaskedDecoder,
    MaskedKnobs,
    MaskedState,
    UnmaskedInfo,
)
from paradec_jax.decode.rules import RELAXATIONS, noisy, relaxed
from paradec_jax.records import choices, pytree


@pytree
class SoftMaskedKnobs(MaskedKnobs):
    """Knobs of `Masked`, and how soft its tokens are.

    Attributes:
      token_temperature: tau of the mixture that stands for a token, above 0.
    """

    token_temperature: Number = knob(1.0, POSITIVE)


@pytree
class SoftMaskedState(MaskedState):
    """The state of `Masked`, and what is soft about its tokens.

    Attributes:
      offsets: difference that is added to the vector of each position's token, [B, S, D].
    """

    offsets: Float[Array, "B S D"]


@pytree
class SoftUnmaskedInfo(UnmaskedInfo):
    """What a call revealed, and the final hidden state of every position, [B, S, D]."""

    hidden: Float[Array, "B S D"]


@choices
class SoftMasked(MaskedDecoder):
    """`Masked` whose tokens carry gradients through `rollout`.

    Attributes:
      order, confidence, chunk: as those of `Masked`.
      relaxation: "straight_through" (what is read is a token, its gradient a mixture's) or "soft"
        (a mixture).
    """

    relaxation: str = "straight_through"
    Knobs = SoftMaskedKnobs
    WORDS = {**MaskedDecoder.WORDS, "relaxation": RELAXATIONS}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: SoftMaskedKnobs) -> SoftMaskedState:
        """As `Masked`; the vectors of given positions are those of `SoftGiven`, or their tokens'."""
        hard, table = self.fill(request, 0, knobs), self.network.embedding(params)
        offsets = given_offsets(self, request, table, hard.shown)
        return SoftMaskedState(**vars(hard), offsets=offsets)

    def step(
        self, params: Any, state: SoftMaskedState, knobs: SoftMaskedKnobs
    ) -> tuple[SoftMaskedState, SoftUnmaskedInfo]:
        """The step of `Masked` on relaxed vectors, for each row's next group."""
        at = jnp.zeros_like(state.rows.length)
        tokens, positions, _, mask = state.window(at, self.size)
        table = self.network.embedding(params)
        out = self.network.forward(params, table[tokens] + state.offsets, positions, None, mask)
        state, hidden = state.spend(out.counts, state.rows.limit), out.hidden

        # Tokens as `Masked` draws them, and what the relaxation adds to their vectors: q is a
        # softmax of the scores.
        def draw(logits: Array, positions: Array) -> tuple[Array, Array]:
            noised = noisy(
                logits,
                positions,
                state.rows.keys,
                knobs,
                top_p_rule=self.top_p_rule,
                greedy=self.greedy,
            )
            tokens = jnp.argmax(noised, axis=-1).astype(jnp.int32)
            return tokens, relaxed(table, noised, tokens, knobs.token_temperature, self.relaxation)

        new, info, offsets = self.unmask(params, state, hidden, at, state.groups, knobs, draw)
        offsets = jnp.where(info.where[..., None], offsets, state.offsets)
        return dataclasses.replace(new, offsets=offsets), SoftUnmaskedInfo(
            **vars(info), hidden=hidden
        )
