"""Masking noise: how much of a text it hides, at which times, and which tokens."""

from paradec_jax.noise.blocks import BlockNoise as BlockNoise
from paradec_jax.noise.blocks import Hidden as Hidden
from paradec_jax.noise.blocks import choose as choose
from paradec_jax.noise.blocks import first_of_each as first_of_each
from paradec_jax.noise.schedules import LOGLINEAR as LOGLINEAR
from paradec_jax.noise.schedules import MDLM_TIMES as MDLM_TIMES
from paradec_jax.noise.schedules import SDTT_TIMES as SDTT_TIMES
from paradec_jax.noise.schedules import Schedule as Schedule
from paradec_jax.noise.schedules import Times as Times
from paradec_jax.noise.schedules import hide as hide
from paradec_jax.noise.schedules import rounded_up as rounded_up
