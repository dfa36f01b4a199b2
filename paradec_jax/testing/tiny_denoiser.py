"""A tiny denoiser whose random weights have opinions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.config import MASKED_DIFFUSION_PRESETS
from paradec_jax.models import denoiser
from paradec_jax.models.denoiser_network import DenoiserNetwork


def tiny_denoiser(**changes: Any) -> DenoiserNetwork:
    """A denoiser of a few thousand parameters; `changes` are fields of its config."""
    return DenoiserNetwork(dataclasses.replace(MASKED_DIFFUSION_PRESETS["test-mdlm"], **changes))


@functools.cache
def tiny_denoiser_params(seed: int = 0, spread: float = 0.3, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_denoiser`: a fresh model's, where zeros silence them, and noise of that spread."""
    with jax.ensure_compile_time_eval():  # the first caller may be under a trace, the next one is not
        start, noise = jax.random.split(jax.random.key(seed))
        leaves, tree = jax.tree.flatten(denoiser.init_params(tiny_denoiser(**changes).config, start))
        keys = jax.random.split(noise, len(leaves))
        noisy = [
            x + spread * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.map(jnp.asarray, jax.tree.unflatten(tree, noisy))
