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
    blocks = {}
    if all(map(_on_one_device, jax.tree.leaves(params))):
        blocks = {name: tree for name, tree in params.items() if isinstance(tree, Mapping)}
    separate = {
        block: {part: [tree[part][name] for name in names] for part, (_, names) in JOINED.items()}
        for block, tree in blocks.items()
    }
    joined, head = _laid_out(
        separate, params["embedding"] if config.tie_embeddings and cpu_layouts() else None
    )
    prepared = dict(params)
    for block, tree in blocks.items():
        prepared[block] = dict(tree)
        for part, (name, names) in JOINED.items():
            kept = {key: leaf for key, leaf in tree[part].items() if key not in names}
            prepared[block][part] = kept | {name: joined[block][part]}
    if head is not None:
        prepared["head"] = head
    return prepared


@jax.jit
def _laid_out(separate: Any, embedding: Array | None) -> tuple[Any, Array | None]:
    """Matrices joined, and the head: one program, because each would cost the first answer a compilation."""
    joined = jax.tree.map(_join, separate, is_leaf=lambda node: isinstance(node, list))
    # The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one; the barrier keeps it
    # from folding the transposition into the product.
    return joined, None if embedding is None else lax.optimization_barrier(embedding.T)


def _join(matrices: list[Array]) -> Array:
    """One matrix out of several of the same rows [D, ...]."""
    return jnp.concatenate([rearrange(m, "d ... -> d (...)") for m in matrices], axis=1)


def _on_one_device(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1
