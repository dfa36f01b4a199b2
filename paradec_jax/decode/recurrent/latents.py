"""Initial latent states: what every decoder of recurrent-depth networks says of them."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.request import RecordedDraws, Request


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentKnobs(SamplingKnobs):
    """Sampling, and where latent states begin.

    Attributes:
      init_scale: scale of random initial latent states.
    """

    init_scale: Float[Array, ""] | float = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedLatents(RecordedDraws):
    """Recorded draws, `states` among them: initial latent of each position at scale 1, for all rows, [P, D]."""

    states: Float[Array, "P D"] | None = None


def initial_latents(request: Request, knobs: LatentKnobs) -> dict[str, Any]:
    """What `init_cache` of a recurrent network is told."""
    recorded = request.recorded
    return {"scale": knobs.init_scale, "states": None if recorded is None else recorded.states}
