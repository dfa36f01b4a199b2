"""Networks, and the adapters by which decoders drive them."""

from typing import Any

from jaxtyping import Array

from paradec_jax.config import ModelConfig, RecurrentDepthConfig
from paradec_jax.models import causal, recurrent_depth
from paradec_jax.models.axes import logical_axes, matrix_axes
from paradec_jax.models.base import Prepared
from paradec_jax.models.causal import Causal
from paradec_jax.models.causal_network import CausalNetwork
from paradec_jax.models.growth import deepen_core
from paradec_jax.models.prepare import prepare_params
from paradec_jax.models.recurrent_depth import RecurrentDepth
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork

__all__ = [
    "Causal",
    "CausalNetwork",
    "Prepared",
    "RecurrentDepth",
    "RecurrentDepthNetwork",
    "deepen_core",
    "init_params",
    "logical_axes",
    "matrix_axes",
    "network_of",
    "parameter_shapes",
    "prepare_params",
]


def network_of(config: ModelConfig) -> CausalNetwork | RecurrentDepthNetwork:
    """The network of a config, as decoders and losses see it."""
    if isinstance(config, RecurrentDepthConfig):
        return RecurrentDepthNetwork(config)
    return CausalNetwork(config)


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    if isinstance(config, RecurrentDepthConfig):
        return recurrent_depth.parameter_shapes(config)
    return causal.parameter_shapes(config)


def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Random parameters; see each model's own function for their spread."""
    if isinstance(config, RecurrentDepthConfig):
        return recurrent_depth.init_params(config, key)
    return causal.init_params(config, key)
