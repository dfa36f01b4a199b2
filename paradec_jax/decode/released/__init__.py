"""Replicas of released programs, quirk for quirk. Only tests and studies import them.

Their published numbers can be repeated with them, and their recorded runs replayed; `Recorded...` are the draws that
take the place of the keys.
"""

from paradec_jax.decode.released.adaptive import ReleasedAdaptive
from paradec_jax.decode.released.block_diffusion import ReleasedDenoising
from paradec_jax.decode.released.blocks import RecordedBlocks
from paradec_jax.decode.released.jacobi import ReleasedJacobi
from paradec_jax.decode.released.lookahead import ReleasedLookahead
from paradec_jax.decode.released.masked import ReleasedMasked
from paradec_jax.decode.released.masked_rules import RecordedRaces
from paradec_jax.decode.released.multiblock import ReleasedMultiBlock
from paradec_jax.decode.released.position_wise import LossyPositionWise
from paradec_jax.decode.released.prompt_lookup import ReleasedPromptLookup
from paradec_jax.decode.released.residual import ReleasedSpeculative, ReleasedVeto
from paradec_jax.decode.released.running_window import ReleasedRunningWindow
from paradec_jax.decode.released.strided import ReleasedStrided
from paradec_jax.decode.released.wave import RecordedWave
from paradec_jax.decode.released.wavefront import ReleasedWavefront

__all__ = [
    "LossyPositionWise",
    "RecordedBlocks",
    "RecordedRaces",
    "RecordedWave",
    "ReleasedAdaptive",
    "ReleasedDenoising",
    "ReleasedJacobi",
    "ReleasedLookahead",
    "ReleasedMasked",
    "ReleasedMultiBlock",
    "ReleasedPromptLookup",
    "ReleasedRunningWindow",
    "ReleasedSpeculative",
    "ReleasedStrided",
    "ReleasedVeto",
    "ReleasedWavefront",
]
