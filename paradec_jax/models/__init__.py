"""Networks as Linen modules, and the adapters by which decoders and losses drive them."""

from paradec_jax.models.denoiser import Denoiser
from paradec_jax.models.denoiser_network import DenoiserNetwork
from paradec_jax.models.prepare import prepare_params
from paradec_jax.models.recurrent_depth import RecurrentDepth
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork
from paradec_jax.models.residual_head import ResidualHead
from paradec_jax.models.residual_head_network import ResidualHeadNetwork
from paradec_jax.models.transformer import Transformer
from paradec_jax.models.transformer_network import TransformerNetwork
from paradec_jax.models.update_work import batch_flops, head_flops, update_flops

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
    "head_flops",
    "prepare_params",
    "update_flops",
]
