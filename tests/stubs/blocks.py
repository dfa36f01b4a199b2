"""A tiny transformer that sees in blocks, and a tiny residual head for it."""

import dataclasses
import functools
from typing import Any

import jax

from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, ResidualHeadConfig
from paradec_jax.models import residual_head, transformer
from paradec_jax.models.residual_head_network import ResidualHeadNetwork
from paradec_jax.models.transformer_network import TransformerNetwork


def tiny_blocks(**changes: Any) -> TransformerNetwork:
    """A transformer of a few thousand parameters that sees in blocks; `changes` are fields of its config."""
    return TransformerNetwork(dataclasses.replace(BLOCK_DIFFUSION_PRESETS["test-sdar"], **changes))


@functools.cache
def tiny_blocks_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_blocks`, all multiplied by `gain`."""
    with jax.ensure_compile_time_eval():  # the first caller may be under a trace, the next one is not
        config = tiny_blocks(**changes).config
        return jax.tree.map(lambda x: gain * x, transformer.init_params(config, jax.random.key(seed)))


def tiny_head(**changes: Any) -> ResidualHeadNetwork:
    """A residual head of one layer for `tiny_blocks` of the same `changes`."""
    return ResidualHeadNetwork(ResidualHeadConfig.of(tiny_blocks(**changes).config, layers=1))


@functools.cache
def tiny_head_params(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_head`, drawn as the released heads began."""
    with jax.ensure_compile_time_eval():
        config = tiny_head(**changes).config
        return residual_head.init_params(config, jax.random.key(seed), "normal_0.2")
