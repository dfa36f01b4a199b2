"""Networks as decoders and losses drive them, and what their calls cost."""

from paradec_jax.models.denoiser import DenoiserNetwork
from paradec_jax.models.drafts import DraftNetwork
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork
from paradec_jax.models.residual_head import ResidualHeadNetwork
from paradec_jax.models.transformer import TransformerNetwork
from paradec_jax.models.work import batch_flops, update_flops
