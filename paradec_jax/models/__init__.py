"""Networks, and the adapters by which decoders drive them."""

from paradec_jax.models.recurrent_depth import RecurrentDepth, RecurrentDepthNetwork

__all__ = ["RecurrentDepth", "RecurrentDepthNetwork"]
