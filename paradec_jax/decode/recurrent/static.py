"""Decoding at a fixed depth: one token a network call, r recurrences each."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.recurrent.latents import LatentKnobs, initial_latents
from paradec_jax.decode.rules.windows import last_of, write_after_read


@dataclasses.dataclass(frozen=True)
class Static(DecoderBase):
    """`AutoRegressive` for recurrent-depth networks: chosen depths, chosen initial latents.

    Attributes:
      recurrence: r, recurrences a token; the network's when None.
      prefill_recurrence: r of the prompt; that of a token when None.
      continuous: each new position starts from the latent (after the final norm) of the one before it instead of a
        random one ("continuous compute", arXiv 2502.05171).
    """

    _: dataclasses.KW_ONLY
    recurrence: int | None = None
    prefill_recurrence: int | None = None
    continuous: bool = False
    Knobs: ClassVar[type] = LatentKnobs

    def init(self, params: Any, request: Request, knobs: LatentKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        depth = self.recurrence if self.prefill_recurrence is None else self.prefill_recurrence
        rows = self.begin(request, 1)
        cache = self.empty_cache(request, rows.tokens.shape[1], **initial_latents(request, knobs))
        visible, lengths = None, request.lengths
        return self._read(
            params, rows, cache, depth, request.tokens, request.positions, visible, lengths, knobs
        )

    def step(self, params: Any, state: CachedState, knobs: LatentKnobs) -> tuple[CachedState, None]:
        """Feeds the newest token through r recurrences and commits the token it predicts."""
        token, position = state.rows.newest
        one = jnp.ones_like(state.cached)
        state = self._read(
            params, state.rows, state.cache, self.recurrence, token, position, state.cached, one, knobs
        )
        return state, None

    def _read(
        self,
        params: Any,
        rows: Rows,
        cache: Any,
        depth: int | None,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        visible: Int[Array, "B"] | None,
        widths: Int[Array, "B"],
        knobs: LatentKnobs,
    ) -> CachedState:
        """One call on a window whose first `widths` positions are real; commits what its last one predicts."""
        network, at = self.network.at(depth), positions[:, 0]
        start = network.latents(cache, positions)
        out, latent = network.forward_from(params, tokens, positions, start, Prefix(cache, visible))
        rows = rows.spend(out.counts, widths)
        rows, token = self.commit_next(params, rows, last_of(out.hidden, widths), knobs)
        cache = network.write(cache, out.kv, write_after_read(at, token))
        if self.continuous:
            carried = network.normalise(params, last_of(latent, widths))
            cache = network.start_from(cache, carried, at + widths)
        return CachedState(rows, cache)
