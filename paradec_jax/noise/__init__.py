"""Masking noise: how much of a text it hides at a time, which times are drawn, and which tokens are hidden."""

from paradec_jax.noise.blocks import BlockNoise, Hidden, choose
from paradec_jax.noise.schedules import LOGLINEAR, MDLM_TIMES, SDTT_TIMES, Schedule, Times, hide, rounded_up

__all__ = [
    "LOGLINEAR",
    "MDLM_TIMES",
    "SDTT_TIMES",
    "BlockNoise",
    "Hidden",
    "Schedule",
    "Times",
    "choose",
    "hide",
    "rounded_up",
]
