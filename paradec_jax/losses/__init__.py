"""Objectives, one a file: `(params, frozen, batch, key) -> (loss, metrics)`."""

from paradec_jax.losses.block_diffusion import BlockRules, block_diffusion_loss
from paradec_jax.losses.cllm import cllm_loss
from paradec_jax.losses.consistency import (
    CLEAN_CONTEXT,
    MULTIBLOCK,
    PAPER,
    WINDOWED,
    ConsistencyRules,
    consistency_loss,
)
from paradec_jax.losses.masked_diffusion import BoundRules, masked_diffusion_loss
from paradec_jax.losses.next_token import next_token_loss
from paradec_jax.losses.recurrent import exponential, poisson_lognormal, recurrent_loss
from paradec_jax.losses.recurrent_consistency import recurrent_consistency_loss
from paradec_jax.losses.residual import ResidualRules, residual_loss
from paradec_jax.losses.self_distillation import DistillationRules, self_distillation_loss
from paradec_jax.losses.stepwise import stepwise_loss

__all__ = [
    "CLEAN_CONTEXT",
    "MULTIBLOCK",
    "PAPER",
    "WINDOWED",
    "BlockRules",
    "BoundRules",
    "ConsistencyRules",
    "DistillationRules",
    "ResidualRules",
    "block_diffusion_loss",
    "cllm_loss",
    "consistency_loss",
    "exponential",
    "masked_diffusion_loss",
    "next_token_loss",
    "poisson_lognormal",
    "recurrent_consistency_loss",
    "recurrent_loss",
    "residual_loss",
    "self_distillation_loss",
    "stepwise_loss",
]
