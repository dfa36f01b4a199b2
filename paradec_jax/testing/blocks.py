"""A tiny transformer that sees in blocks."""

import dataclasses
import functools
from typing import Any

import jax

from paradec_jax.config import BLOCK_DIFFUSION_PRESETS
from paradec_jax.models import transformer
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
