"""Shapes of models, facts of checkpoints, and the named presets."""

from paradec_jax.config.heads import DraftConfig as DraftConfig
from paradec_jax.config.heads import ResidualHeadConfig as ResidualHeadConfig
from paradec_jax.config.heads import check_fits as check_fits
from paradec_jax.config.presets import BLOCK_DIFFUSION_PRESETS as BLOCK_DIFFUSION_PRESETS
from paradec_jax.config.presets import CAUSAL_PRESETS as CAUSAL_PRESETS
from paradec_jax.config.presets import FULL_ATTENTION_PRESETS as FULL_ATTENTION_PRESETS
from paradec_jax.config.presets import MASKED_DIFFUSION_PRESETS as MASKED_DIFFUSION_PRESETS
from paradec_jax.config.presets import RECURRENT_PRESETS as RECURRENT_PRESETS
from paradec_jax.config.rotary import RopeScaling as RopeScaling
from paradec_jax.config.shapes import BlockDiffusionConfig as BlockDiffusionConfig
from paradec_jax.config.shapes import CausalConfig as CausalConfig
from paradec_jax.config.shapes import FullAttentionConfig as FullAttentionConfig
from paradec_jax.config.shapes import MaskedDiffusionConfig as MaskedDiffusionConfig
from paradec_jax.config.shapes import ModelConfig as ModelConfig
from paradec_jax.config.shapes import RecurrentDepthConfig as RecurrentDepthConfig
from paradec_jax.config.shapes import TokenSpec as TokenSpec
from paradec_jax.config.shapes import TransformerConfig as TransformerConfig
