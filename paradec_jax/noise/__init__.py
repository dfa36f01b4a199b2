"""Masking noise: how much of a text it hides, at which times, and which tokens."""

from paradec_jax.noise.blocks import BlockNoise, Hidden, choose, first_of_each, monotone
from paradec_jax.noise.schedules import (
    LOGLINEAR,
    MDLM_TIMES,
    SDTT_TIMES,
    Schedule,
    Times,
    hide,
    rounded_up,
)
