"""Static autoregressive decoding: one token a network call."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.decode import stop
from paradec_jax.decode.base import DecoderBase, last_of, newest, prompt_positions
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.sampling import SamplingKnobs, log_probability, sample


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
      continuous: start each new position from the latent (after the final norm) of the one before it instead
        of a random state ("continuous compute").
    """

    _: dataclasses.KW_ONLY
    recurrence: int | None = None
    continuous: bool = False
    Knobs: ClassVar[type] = AutoRegressiveKnobs

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.recurrence is None else self.recurrence

    def init(self, params: Any, request: Request, knobs: AutoRegressiveKnobs) -> AutoRegressiveState:
        """Reads the prompt and commits the first token."""
        progress = stop.start(request, self.size, 1, self.log_probs)
        cache = self.network.init_cache(request.batch, self.size + 1)
        positions = prompt_positions(request)
        state = self.latents(request.keys, positions, knobs.init_scale, request.recorded)
        visible = jnp.zeros(request.batch, jnp.int32)
        out = self.network.forward(params, request.tokens, positions, cache, visible, state, self._r)
        cache = self.network.write(cache, out.kv, visible)
        progress = progress.count(1, request.lengths, self._r)
        hidden = last_of(out.hidden, request.lengths)
        progress = self._commit_next(params, progress, hidden, knobs)
        return AutoRegressiveState(progress, cache, last_of(out.latent, request.lengths))

    def step(
        self, params: Any, state: AutoRegressiveState, knobs: AutoRegressiveKnobs
    ) -> AutoRegressiveState:
        """Feeds the newest token through r recurrences and commits the token it predicts."""
        progress = state.progress
        tokens, positions = newest(progress)
        latent = state.latent
        if not self.continuous:
            latent = self.latents(progress.keys, positions, knobs.init_scale, progress.recorded)
        cached = progress.length - 1
        out = self.network.forward(params, tokens, positions, state.cache, cached, latent, self._r)
        cache = self.network.write(state.cache, out.kv, cached)
        progress = self._commit_next(params, progress.count(1, 1, self._r), out.hidden, knobs)
        return AutoRegressiveState(progress, cache, out.latent)

    def _commit_next(
        self, params: Any, progress: Progress, hidden: Float[Array, "B 1 D"], knobs: AutoRegressiveKnobs
    ) -> Progress:
        logits = self.network.logits(params, hidden)
        at = progress.length[:, None]
        token = sample(logits, at, progress.keys, knobs, progress.recorded, top_p_rule=self.top_p_rule)
        scores = log_probability(logits, token) if self.log_probs else None
        return stop.commit(progress, token, jnp.ones_like(progress.length), scores)
