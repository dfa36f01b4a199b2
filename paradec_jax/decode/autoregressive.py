"""Autoregressive decoding: one token a network call, the baseline of causal decoders."""

import dataclasses
from typing import Any

from paradec_jax.decode.machine import CachedState, DecoderBase, Prefix, RepetitionKnobs, Request
from paradec_jax.decode.rules import write_after_read


@dataclasses.dataclass(frozen=True)
class AutoRegressive(DecoderBase):
    """Feeds the newest token, samples the next one, and so on."""

    Knobs = RepetitionKnobs

    def init(self, params: Any, request: Request, knobs: RepetitionKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        rows, cache, _ = self.prefill(params, request, knobs, 1)
        return CachedState(rows, cache)

    def step(
        self, params: Any, state: CachedState, knobs: RepetitionKnobs
    ) -> tuple[CachedState, None]:
        """Feeds the newest token and commits the one it predicts."""
        token, position = state.rows.newest
        out = self.network.forward(params, token, position, Prefix(state.cache, state.cached))
        rows = state.rows.spend(out.counts, 1)
        rows, token = self.commit_next(params, rows, out.hidden, knobs)
        cache = self.network.write(state.cache, out.kv, write_after_read(state.cached, token))
        return CachedState(rows, cache), None
