"""The decoding machine: a protocol, four drivers, and one file a decoder."""

from paradec_jax.decode.autoregressive import AutoRegressive
from paradec_jax.decode.block.denoising import BlockDenoising
from paradec_jax.decode.block.multi import MultiBlock
from paradec_jax.decode.block.residual import Residual
from paradec_jax.decode.block.residual_speculative import ResidualSpeculative
from paradec_jax.decode.block.self_verified import SelfVerified
from paradec_jax.decode.block.soft_block import SoftBlock
from paradec_jax.decode.causal.drafted import Drafted
from paradec_jax.decode.causal.jacobi import Jacobi
from paradec_jax.decode.causal.lookahead import Lookahead
from paradec_jax.decode.causal.prompt_lookup import PromptLookup
from paradec_jax.decode.machine import (
    Decoded,
    DecoderBase,
    Forward,
    Network,
    Prefix,
    Reason,
    RecordedDraws,
    Request,
    Rows,
    SamplingKnobs,
    SoftGiven,
    make_request,
    rollout,
    run,
    serve,
    stream,
    trace,
)
from paradec_jax.decode.masked.masked import Masked
from paradec_jax.decode.masked.planned import Planned
from paradec_jax.decode.masked.prophet import Prophet
from paradec_jax.decode.masked.semi_autoregressive import SemiAutoregressive
from paradec_jax.decode.masked.soft_masked import SoftMasked
from paradec_jax.decode.masked.speculative import SpeculativeDenoising
from paradec_jax.decode.masked.strided import Strided
from paradec_jax.decode.masked.wino import Wino
from paradec_jax.decode.recurrent.adaptive import Adaptive
from paradec_jax.decode.recurrent.soft_wavefront import SoftWavefront
from paradec_jax.decode.recurrent.speculative import SelfSpeculative
from paradec_jax.decode.recurrent.static import Static
from paradec_jax.decode.recurrent.wavefront import Wavefront

__all__ = [
    "Adaptive",
    "AutoRegressive",
    "BlockDenoising",
    "Decoded",
    "DecoderBase",
    "Drafted",
    "Forward",
    "Jacobi",
    "Lookahead",
    "Masked",
    "MultiBlock",
    "Network",
    "Planned",
    "Prefix",
    "PromptLookup",
    "Prophet",
    "Reason",
    "RecordedDraws",
    "Request",
    "Residual",
    "ResidualSpeculative",
    "Rows",
    "SamplingKnobs",
    "SelfSpeculative",
    "SelfVerified",
    "SemiAutoregressive",
    "SoftBlock",
    "SoftGiven",
    "SoftMasked",
    "SoftWavefront",
    "SpeculativeDenoising",
    "Static",
    "Strided",
    "Wavefront",
    "Wino",
    "make_request",
    "rollout",
    "run",
    "serve",
    "stream",
    "trace",
]
