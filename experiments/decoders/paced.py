"""A wave that keeps a pace whatever the weights say, for timings and counts on random weights.

With random weights drafts change at every step and nothing converges. Here every token is the same,
so drafts agree. No state counts as still, and a position leaves after as many recurrences as the
knobs allow. A step costs what a step of the wavefront costs; the text means nothing.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from paradec_jax import Wavefront
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork

TOKEN = 1


@dataclasses.dataclass(frozen=True)
class SameToken(RecurrentDepthNetwork):
    """A recurrent-depth network that predicts one token everywhere."""

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The logits, with one that is above all others."""
        return super().logits(params, hidden) + 1e4 * jax.nn.one_hot(TOKEN, self.vocab_size)


def same_token(network: RecurrentDepthNetwork) -> SameToken:
    """The same network, predicting one token everywhere."""
    return SameToken(
        **{field.name: getattr(network, field.name) for field in dataclasses.fields(network)}
    )


def paced_wavefront(
    recurrence: int, inner_recurrence: int, window: int | None = None, **options: Any
) -> tuple[Wavefront, Any]:
    """A wave and its knobs that give each token `recurrence` recurrences, or up to a step more, on
    `same_token`.

    Once the window is full, a token is committed each step; by default the window is as wide as
    that takes. `options` are further fields of `Wavefront`.
    """
    steps = -(-recurrence // inner_recurrence)
    wave = Wavefront(
        inner_recurrence=inner_recurrence,
        window=steps if window is None else window,
        greedy=True,
        **options,
    )
    return wave, wave.Knobs(
        exit_threshold=0.0, momentum=0.0, max_recurrence=steps * inner_recurrence
    )
