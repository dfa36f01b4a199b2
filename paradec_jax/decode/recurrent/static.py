"""Decoding at a fixed depth: one token a network call, r recurrences each."""

from typing import Any

from paradec_jax.decode.machine import CachedState, DecoderBase, Prefix, Request
from paradec_jax.decode.recurrent.latents import Inputs, LatentKnobs, empty_state
from paradec_jax.decode.rules import last_of, write_after_read
from paradec_jax.records import choices


@choices
class Static(DecoderBase):
    """`AutoRegressive` for recurrent-depth networks: chosen depths, chosen initial latents.

    Attributes:
      recurrence: r, recurrences a token; the network's when None.
      prefill_recurrence: r of the prompt; that of a token when None.
      continuous: each new position starts from the latent (after the final norm) of the one before
        it instead of a random one ("continuous compute", arXiv 2502.05171).
    """

    recurrence: int | None = None
    prefill_recurrence: int | None = None
    continuous: bool = False
    Knobs = LatentKnobs

    def init(self, params: Any, request: Request, knobs: LatentKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        depth = self.prefill_recurrence or self.recurrence
        state, fed = empty_state(self, request, 1, knobs), Inputs.prompt(request)
        return read(self, params, state, fed, knobs, depth, self.continuous)

    def step(self, params: Any, state: CachedState, knobs: LatentKnobs) -> tuple[CachedState, None]:
        """Feeds the newest token through r recurrences and commits the token it predicts."""
        fed = Inputs.newest(state)
        return read(self, params, state, fed, knobs, self.recurrence, self.continuous), None


def read(
    decoder: DecoderBase,
    params: Any,
    state: CachedState,
    fed: Inputs,
    knobs: LatentKnobs,
    depth: int | None,
    continuous: bool,
) -> CachedState:
    """One call of `depth` recurrences; commits what the last real position of each row predicts.

    Where it is `continuous`, the next position starts from this one's latent.
    """
    network, cache = decoder.network.at(depth), state.cache
    start = network.latents(cache, fed.positions)
    out, latent = network.forward_from(
        params, fed.tokens, fed.positions, start, Prefix(cache, fed.visible)
    )
    rows = state.rows.spend(out.counts, fed.widths)
    rows, token = decoder.commit_next(params, rows, last_of(out.hidden, fed.widths), knobs)
    cache = network.write(cache, out.kv, write_after_read(fed.at, token))
    if continuous:
        carried = network.normalise(params, last_of(latent, fed.widths))
        cache = network.start_from(cache, carried, fed.at + fed.widths)
    return CachedState(rows, cache)
