"""How decoders of recurrent-depth networks begin: initial latents, and what a call is fed."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine import (
    CachedState,
    DecoderBase,
    Number,
    RecordedDraws,
    Request,
    SamplingKnobs,
)
from paradec_jax.decode.rules import positions_of
from paradec_jax.records import pytree


@pytree
class LatentKnobs(SamplingKnobs):
    """Sampling, and where latent states begin.

    Attributes:
      init_scale: scale of random initial latent states.
    """

    init_scale: Number = 1.0


@pytree
class RecordedLatents(RecordedDraws):
    """Recorded draws, `states` among them: initial latent of each position at scale 1, for all
    rows, [P, D].
    """

    states: Float[Array, "P D"] | None = None


def initial_latents(request: Request, knobs: LatentKnobs) -> dict[str, Any]:
    """Options of a recurrent network's `init_cache`, which draws the initial latents."""
    recorded = request.recorded
    return {"scale": knobs.init_scale, "states": None if recorded is None else recorded.states}


@pytree
class Inputs:
    """A window that is fed to the network.

    Attributes:
      tokens, positions: tokens of the window and where they stand, [B, W].
      widths: positions that are real, [B].
      visible: cache entries that it sees, [B]; None for a prompt.
    """

    tokens: Int[Array, "B W"]
    positions: Int[Array, "B W"]
    widths: Int[Array, "B"]
    visible: Int[Array, "B"] | None

    @classmethod
    def prompt(cls, request: Request) -> "Inputs":
        """The prompts."""
        return cls(request.tokens, positions_of(request.tokens), request.lengths, None)

    @classmethod
    def newest(cls, state: CachedState) -> "Inputs":
        """The newest token of each row."""
        token, position = state.rows.newest
        return cls(token, position, jnp.ones_like(state.cached), state.cached)

    @property
    def at(self) -> Int[Array, "B"]:
        """The first position."""
        return self.positions[:, 0]


def empty_state(
    decoder: DecoderBase, request: Request, scratch: int, knobs: LatentKnobs
) -> CachedState:
    """Fresh rows with room for a window of `scratch` positions, and an empty cache."""
    rows = decoder.begin(request, scratch)
    return CachedState(
        rows, decoder.empty_cache(request, rows.tokens.shape[1], **initial_latents(request, knobs))
    )
