"""Static autoregressive decoding: one token a network call."""

import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from paradec_jax.decode import stop
from paradec_jax.decode.base import DecoderBase, after, newest
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.sampling import SamplingKnobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutoRegressiveKnobs(SamplingKnobs):
    """Sampling, and `init_scale`, the scale of random initial latent states."""

    init_scale: Float[Array, "..."] | float = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutoRegressiveState:
    """Rows, cache (one entry less than committed tokens), and the last latent where it is carried on."""

    progress: Progress
    cache: Any
    latent: Float[Array, "B 1 D"]


@dataclasses.dataclass(frozen=True)
class AutoRegressive(DecoderBase):
    """Feeds the newest token, samples the next one, and so on.

    Attributes:
      recurrence: r, recurrences a token; the network's default when None.
      prefill_recurrence: r of the prompt; that of a token when None.
      continuous: start each new position from the latent (after the final norm) of the one before it instead
        of a random state ("continuous compute").
    """

    _: dataclasses.KW_ONLY
    recurrence: int | None = None
    prefill_recurrence: int | None = None
    continuous: bool = False
    Knobs: ClassVar[type] = AutoRegressiveKnobs

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.recurrence is None else self.recurrence

    def init(self, params: Any, request: Request, knobs: AutoRegressiveKnobs) -> AutoRegressiveState:
        """Reads the prompt and commits the first token."""
        r = self._r if self.prefill_recurrence is None else self.prefill_recurrence
        progress, cache, latent = self.prefill(params, request, knobs, r, 1)
        return AutoRegressiveState(progress, cache, latent)

    def step(
        self, params: Any, state: AutoRegressiveState, knobs: AutoRegressiveKnobs
    ) -> AutoRegressiveState:
        """Feeds the newest token through r recurrences and commits the token it predicts."""
        progress = state.progress
        tokens, positions = newest(progress)
        latent = state.latent
        if not self.continuous:
            latent = stop.window(progress.initial, positions[:, 0], 1)
        cached = progress.length - 1
        out = self.network.forward(params, tokens, positions, state.cache, cached, latent, self._r)
        progress, token = self.commit_next(params, progress.count(1, 1, self._r), out.hidden, knobs)
        cache = self.network.write(state.cache, out.kv, after(cached, token))
        return AutoRegressiveState(progress, cache, out.latent)
