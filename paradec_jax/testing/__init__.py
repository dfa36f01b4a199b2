"""Networks with known answers, and tiny models, for tests of decoders."""

from paradec_jax.testing.blocks import tiny_blocks, tiny_blocks_params, tiny_head, tiny_head_params
from paradec_jax.testing.causal import StubCausal, tiny_causal, tiny_causal_params
from paradec_jax.testing.denoiser import StubDenoiser, tiny_denoiser, tiny_denoiser_params
from paradec_jax.testing.head import StubHead
from paradec_jax.testing.posterior import JointBlocks, JointDenoiser, SumDenoiser
from paradec_jax.testing.recurrent import StubNetwork, tiny_network, tiny_params
from paradec_jax.testing.requests import PROMPTS, tiny_request
from paradec_jax.testing.stubs import Spoilt

__all__ = [
    "PROMPTS",
    "JointBlocks",
    "JointDenoiser",
    "Spoilt",
    "StubCausal",
    "StubDenoiser",
    "StubHead",
    "StubNetwork",
    "SumDenoiser",
    "tiny_blocks",
    "tiny_blocks_params",
    "tiny_causal",
    "tiny_causal_params",
    "tiny_denoiser",
    "tiny_denoiser_params",
    "tiny_head",
    "tiny_head_params",
    "tiny_network",
    "tiny_params",
    "tiny_request",
]
