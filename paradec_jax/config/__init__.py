"""Shapes of models, facts of checkpoints, and the named presets."""

from paradec_jax.config.bounds import (
    MOST,
    MOST_RECURRENCES,
    Ranged,
    check_number,
    check_numbers,
    check_words,
)
from paradec_jax.config.heads import DraftConfig, ResidualHeadConfig, check_fits
from paradec_jax.config.presets import (
    BLOCK_DIFFUSION_PRESETS,
    CAUSAL_PRESETS,
    FULL_ATTENTION_PRESETS,
    MASKED_DIFFUSION_PRESETS,
    RECURRENT_PRESETS,
)
from paradec_jax.config.rotary import RopeScaling
from paradec_jax.config.shapes import (
    BlockDiffusionConfig,
    CausalConfig,
    FullAttentionConfig,
    MaskedDiffusionConfig,
    ModelConfig,
    RecurrentDepthConfig,
    TokenSpec,
    TransformerConfig,
)
