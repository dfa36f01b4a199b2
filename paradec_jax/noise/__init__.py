"""Masking noise: how much of a text it hides at a time, which times are drawn, and which tokens are hidden."""

from paradec_jax.noise.blocks import BlockNoise, Hidden, choose
from paradec_jax.noise.masking import hide
from paradec_jax.noise.schedules import (
    SCHEDULES,
    Cosine,
    CosineSquared,
    Geometric,
    Linear,
    LogLinear,
    Schedule,
    log_probability_range,
)
from paradec_jax.noise.times import MDLM_TIMES, SDTT_TIMES, Times, importance, rounded_up

__all__ = [
    "MDLM_TIMES",
    "SCHEDULES",
    "SDTT_TIMES",
    "BlockNoise",
    "Cosine",
    "CosineSquared",
    "Geometric",
    "Hidden",
    "Linear",
    "LogLinear",
    "Schedule",
    "Times",
    "choose",
    "hide",
    "importance",
    "log_probability_range",
    "rounded_up",
]
