"""Networks as Linen modules, and the adapters by which decoders and losses drive them."""

from paradec_jax.models.denoiser import Denoiser, DenoiserNetwork
from paradec_jax.models.recurrent_depth import RecurrentDepth
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork
from paradec_jax.models.residual_head import ResidualHead, ResidualHeadNetwork
from paradec_jax.models.transformer import Transformer, TransformerNetwork
from paradec_jax.models.work import batch_flops, update_flops

__all__ = [
    "Denoiser",
    "DenoiserNetwork",
    "RecurrentDepth",
    "RecurrentDepthNetwork",
    "ResidualHead",
    "ResidualHeadNetwork",
    "Transformer",
    "TransformerNetwork",
    "batch_flops",
    "update_flops",
]
