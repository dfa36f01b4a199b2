"""Networks as Linen modules, and the adapters by which decoders and losses drive them."""

from paradec_jax.models.causal import Causal
from paradec_jax.models.causal_network import CausalNetwork
from paradec_jax.models.denoiser import Denoiser
from paradec_jax.models.denoiser_network import DenoiserNetwork
from paradec_jax.models.prepare import prepare_denoiser, prepare_params
from paradec_jax.models.recurrent_depth import RecurrentDepth
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork
from paradec_jax.models.residual_head import ResidualHead, ResidualHeadConfig
from paradec_jax.models.residual_head_network import ResidualHeadNetwork

__all__ = [
    "Causal",
    "CausalNetwork",
    "Denoiser",
    "DenoiserNetwork",
    "RecurrentDepth",
    "RecurrentDepthNetwork",
    "ResidualHead",
    "ResidualHeadConfig",
    "ResidualHeadNetwork",
    "prepare_denoiser",
    "prepare_params",
]
