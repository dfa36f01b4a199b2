"""Parameters as decoding loops want them: matrices joined and the tied head laid out, once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from paradec_jax.config import ModelConfig
from paradec_jax.nn.backend import cpu_layouts

# A step of tiny-causal at batch 1 does 37 products with joined matrices and 55 with separate ones, which take 1.05
# times the processor time (median of 200 pairs, 95%: 1.03 to 1.07; AMD EPYC, 2 cores, products on one thread).
JOINED = {"attention": ("qkv", ("q", "k", "v")), "mlp": ("gate_up", ("gate", "up"))}


def prepare_params(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree for `Causal(config, prepared=True)` or `RecurrentDepth(config, prepared=True)`, never for training.

    On one device `attention/qkv` [D, (H + 2G) C] and `mlp/gate_up` [D, 2F] take the place of the matrices that they
    join. Parameters on several devices keep theirs, because heads and channels of a joined matrix cannot be split
    between devices; so do traced ones, whose devices are unknown and which would be joined anew in every call. With
    layouts for the CPU (`nn.backend`) a tied output matrix is laid out as `head` [D, V].
    """
    prepared = dict(params)
    if all(map(_on_one_device, jax.tree.leaves(params))):
        prepared = {name: _join_block(tree) for name, tree in params.items()}
    if config.tie_embeddings and cpu_layouts():
        # The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one; the barrier keeps it
        # from folding the transposition into the product.
        prepared["head"] = lax.optimization_barrier(params["embedding"].T)
    return prepared


def _join_block(tree: Any) -> Any:
    """A block with its matrices joined; anything else as it is."""
    if not isinstance(tree, Mapping):
        return tree
    joined = dict(tree)
    for part, (name, names) in JOINED.items():
        inner = dict(tree[part])
        inner[name] = _join([inner.pop(each) for each in names])
        joined[part] = inner
    return joined


def _join(matrices: list[Array]) -> Array:
    """One matrix out of several of the same rows [D, ...]."""
    return jnp.concatenate([rearrange(m, "d ... -> d (...)") for m in matrices], axis=1)


def _on_one_device(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1
