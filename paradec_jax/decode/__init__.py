"""The decoding machine: a protocol, four drivers, and one file a decoder."""

from paradec_jax.decode.adaptive import Adaptive
from paradec_jax.decode.autoregressive import AutoRegressive
from paradec_jax.decode.drive import rollout, run, stream, trace
from paradec_jax.decode.jacobi import Jacobi
from paradec_jax.decode.lookahead import Lookahead
from paradec_jax.decode.multiblock import MultiBlock
from paradec_jax.decode.official import OfficialWavefront
from paradec_jax.decode.prompt_lookup import PromptLookup
from paradec_jax.decode.protocol import Decoded, Decoder, Network, Reason, Request, make_request
from paradec_jax.decode.queue import Served, serve
from paradec_jax.decode.randomness import Recorded
from paradec_jax.decode.sampling import SamplingKnobs
from paradec_jax.decode.soft_wavefront import SoftWavefront
from paradec_jax.decode.speculative import SelfSpeculative
from paradec_jax.decode.wavefront import Wavefront

__all__ = [
    "Adaptive",
    "AutoRegressive",
    "Decoded",
    "Decoder",
    "Jacobi",
    "Lookahead",
    "MultiBlock",
    "Network",
    "OfficialWavefront",
    "PromptLookup",
    "Reason",
    "Recorded",
    "Request",
    "SamplingKnobs",
    "SelfSpeculative",
    "Served",
    "SoftWavefront",
    "Wavefront",
    "make_request",
    "rollout",
    "run",
    "serve",
    "stream",
    "trace",
]
