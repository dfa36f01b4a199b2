"""Parameters as decoding loops want them: matrices joined, the tied head laid out, modulations made, once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from paradec_jax.config import RecurrentDepthConfig, TransformerConfig
from paradec_jax.models.denoiser import noise_map
from paradec_jax.nn.backend import cpu_layouts
from paradec_jax.nn.modulated import modulation

# A step of tiny-causal at batch 1 does 37 products with joined matrices and 55 with separate ones, which take 1.05
# times the processor time (median of 200 pairs, 95%: 1.03 to 1.07; AMD EPYC, 2 cores, products on one thread).
JOINED = {"attention": ("qkv", ("q", "k", "v")), "mlp": ("gate_up", ("gate", "up"))}


def prepare_params(
    config: TransformerConfig | RecurrentDepthConfig, params: Mapping[str, Any]
) -> dict[str, Any]:
    """A tree for `Transformer(config, prepared=True)` or `RecurrentDepth(config, prepared=True)`, never for training.

    On one device `attention/qkv` [D, (H + 2G) C] and `mlp/gate_up` [D, 2F] take the place of the matrices that they
    join. Parameters on several devices keep theirs, because heads and channels of a joined matrix cannot be split
    between devices; so do traced ones, whose devices are unknown and which would be joined anew in every call. With
    layouts for the CPU (`nn.backend`) a tied output matrix is laid out as `head` [D, V].
    """
    return _prepared(params, params["embedding"] if config.tie_embeddings and cpu_layouts() else None)


def prepare_head(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree for `ResidualHead(config, prepared=True)`: matrices are joined as in `prepare_params`."""
    return _prepared(params, None)


def _prepared(params: Mapping[str, Any], tied: Array | None) -> dict[str, Any]:
    blocks = {}
    if all(map(_on_one_device, jax.tree.leaves(params))):
        blocks = {name: tree for name, tree in params.items() if isinstance(tree, Mapping)}
    separate = {
        block: {part: [tree[part][name] for name in names] for part, (_, names) in JOINED.items()}
        for block, tree in blocks.items()
    }
    joined, head = _laid_out(separate, tied)
    prepared = dict(params)
    for block, tree in blocks.items():
        prepared[block] = dict(tree)
        for part, (name, names) in JOINED.items():
            kept = {key: leaf for key, leaf in tree[part].items() if key not in names}
            prepared[block][part] = kept | {name: joined[block][part]}
    if head is not None:
        prepared["head"] = head
    return prepared


def prepare_denoiser(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree for `Denoiser(config, prepared=True)`: at noise level zero the modulations are constants of the weights.

    `layer_i/constants` [6, D] and `final_constants` [2, D], float32, take the place of noise map, norms and
    modulations. Queries, keys and values are joined as in `prepare_params`.
    """
    blocks = {name: tree for name, tree in params.items() if isinstance(tree, Mapping)}
    whole, parts = JOINED["attention"]
    separate = {}
    if all(map(_on_one_device, jax.tree.leaves(params))):
        separate = {name: [tree["attention"][part] for part in parts] for name, tree in blocks.items()}
    of_block = ("attention_norm", "mlp_norm", "modulation", "modulation_bias")
    made = {name: {key: tree[key] for key in of_block} for name, tree in blocks.items()}
    flat = {key: leaf for key, leaf in params.items() if key not in blocks}
    kept = {key: flat.pop(key) for key in ("embedding", "head", "head_bias")}
    constants, joined = _folded(flat, made, separate)
    for name, tree in blocks.items():
        mixing = dict(tree["attention"])
        if name in joined:
            mixing = {whole: joined[name], "out": mixing["out"]}
        kept[name] = {"constants": constants[name], "attention": mixing, "mlp": tree["mlp"]}
    return kept | {"final_constants": constants["final"]}


@jax.jit
def _folded(flat: Any, blocks: Any, separate: Any) -> tuple[dict[str, Array], Any]:
    """The constants of each block and of the end, and matrices joined, in one program."""
    noise = (flat[f"noise_{name}"] for name in ("in", "in_bias", "out", "out_bias"))
    vector = jax.nn.silu(noise_map(jnp.zeros(1), *noise))

    def constants(weight: Array, bias: Array, *gains: Array) -> Array:
        return jnp.concatenate(modulation(vector, weight, bias, gains))[:, 0]

    found = {"final": constants(flat["final_modulation"], flat["final_modulation_bias"], flat["final_norm"])}
    for name, tree in blocks.items():
        gains = (tree["attention_norm"], tree["mlp_norm"])
        found[name] = constants(tree["modulation"], tree["modulation_bias"], *gains)
    return found, jax.tree.map(_join, separate, is_leaf=lambda node: isinstance(node, list))


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
