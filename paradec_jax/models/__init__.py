"""Networks as decoders and losses drive them, and what their calls cost."""

from paradec_jax.models.denoiser import DenoiserNetwork as DenoiserNetwork
from paradec_jax.models.drafts import DraftNetwork as DraftNetwork
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork as RecurrentDepthNetwork
from paradec_jax.models.residual_head import ResidualHeadNetwork as ResidualHeadNetwork
from paradec_jax.models.transformer import TransformerNetwork as TransformerNetwork
from paradec_jax.models.work import batch_flops as batch_flops
from paradec_jax.models.work import update_flops as update_flops
