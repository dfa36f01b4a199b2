"""Objectives, each a function `(params, frozen, batch, key) -> (loss, metrics)`."""

from paradec_jax.losses.recurrent import exponential, poisson_lognormal, recurrent_loss

__all__ = ["exponential", "poisson_lognormal", "recurrent_loss"]
