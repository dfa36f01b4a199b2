"""Networks with known answers, and tiny models, for tests of decoders."""

from stubs.base import Spoilt
from stubs.blocks import tiny_blocks, tiny_blocks_params, tiny_head, tiny_head_params
from stubs.causal import StubCausal, tiny_causal, tiny_causal_params
from stubs.denoiser import StubDenoiser, tiny_denoiser, tiny_denoiser_params
from stubs.head import StubHead
from stubs.posterior import JointBlocks, JointDenoiser, SumDenoiser
from stubs.recurrent import StubNetwork, tiny_network, tiny_params
from stubs.requests import PROMPTS, tiny_request

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
