"""Replicas of released programs, quirk for quirk. Only tests and studies import them.

Their published numbers can be repeated with them, and their recorded runs replayed; `Recorded...`
are the draws that take the place of the keys.
"""

from experiments.replicas.adaptive import ReleasedAdaptive
from experiments.replicas.block_diffusion import ReleasedDenoising
from experiments.replicas.blocks import RecordedBlocks
from experiments.replicas.full_attention import (
    RecordedCanvas,
    ReleasedCanvas,
    ReplayedFlight,
    ReplayedPlanned,
)
from experiments.replicas.in_flight import ReleasedForcing
from experiments.replicas.jacobi import ReleasedJacobi
from experiments.replicas.lookahead import ReleasedLookahead
from experiments.replicas.masked import ReleasedMasked
from experiments.replicas.masked_rules import RecordedRaces
from experiments.replicas.multiblock import ReleasedMultiBlock
from experiments.replicas.position_wise import LossyPositionWise
from experiments.replicas.prompt_lookup import ReleasedPromptLookup
from experiments.replicas.residual import ReleasedSpeculative, ReleasedVeto
from experiments.replicas.running_window import ReleasedRunningWindow
from experiments.replicas.self_verified import RecordedVerifications, ReleasedVerified
from experiments.replicas.strided import ReleasedStrided
from experiments.replicas.wave import RecordedWave
from experiments.replicas.wavefront import ReleasedWavefront

__all__ = [
    "LossyPositionWise",
    "RecordedBlocks",
    "RecordedCanvas",
    "RecordedRaces",
    "RecordedVerifications",
    "RecordedWave",
    "ReleasedAdaptive",
    "ReleasedCanvas",
    "ReleasedDenoising",
    "ReleasedForcing",
    "ReleasedJacobi",
    "ReleasedLookahead",
    "ReleasedMasked",
    "ReleasedMultiBlock",
    "ReleasedPromptLookup",
    "ReleasedRunningWindow",
    "ReleasedSpeculative",
    "ReleasedStrided",
    "ReleasedVerified",
    "ReleasedVeto",
    "ReleasedWavefront",
    "ReplayedFlight",
    "ReplayedPlanned",
]
