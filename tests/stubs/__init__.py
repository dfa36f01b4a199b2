"""Networks with known answers, and tiny models, for tests of decoders."""

from stubs.base import Spoilt
from stubs.causal import StubCausal
from stubs.denoiser import StubDenoiser
from stubs.drafter import StubDrafter
from stubs.head import StubHead
from stubs.posterior import JointBlocks, JointDenoiser
from stubs.recurrent import StubNetwork
from stubs.tiny import (
    PROMPTS,
    infilling,
    tiny_blocks,
    tiny_blocks_params,
    tiny_causal,
    tiny_causal_params,
    tiny_denoiser,
    tiny_denoiser_params,
    tiny_drafter,
    tiny_drafter_params,
    tiny_full,
    tiny_full_params,
    tiny_head,
    tiny_head_params,
    tiny_network,
    tiny_params,
    tiny_request,
)
