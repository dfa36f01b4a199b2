"""Parameters as decoding loops want them: the tied head laid out, modulations made, once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from paradec_jax.config import MaskedDiffusionConfig
from paradec_jax.models.denoiser import noise_map
from paradec_jax.nn.backend import cpu_layouts
from paradec_jax.nn.modulated import modulation


def prepare_params(config: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree for the config's module with `prepared=True`, never for training.

    With layouts for the CPU (`nn.backend`) a tied output matrix is laid out as `head` [D, V]. At noise level zero a
    denoiser's modulations are constants of its weights: float32 `layer_i/constants` [6, D] and `final_constants`
    [2, D] take the place of noise map, norms and modulations.
    """
    if isinstance(config, MaskedDiffusionConfig):
        kept = {key: params[key] for key in ("embedding", "head", "head_bias")}
        made = _constants(params)
        kept["final_constants"] = made.pop("final")
        for name, constants in made.items():
            parts = {part: params[name][part] for part in ("attention", "mlp")}
            kept[name] = {"constants": constants, **parts}
        return kept
    if not getattr(config, "tie_embeddings", False) or not cpu_layouts():
        return dict(params)
    return {**params, "head": _laid_out(params["embedding"])}


@jax.jit
def _laid_out(embedding: Array) -> Array:
    # The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one; the barrier keeps it
    # from folding the transposition into the product.
    return lax.optimization_barrier(embedding.T)


@jax.jit
def _constants(params: Mapping[str, Any]) -> dict[str, Array]:
    """The constants of each layer and of the end, in one program."""
    noise = (params[f"noise_{name}"] for name in ("in", "in_bias", "out", "out_bias"))
    vector = jax.nn.silu(noise_map(jnp.zeros(1), *noise))

    def constants(tree: Mapping[str, Any], prefix: str, *gains: str) -> Array:
        weight, bias = tree[f"{prefix}modulation"], tree[f"{prefix}modulation_bias"]
        return jnp.concatenate(modulation(vector, weight, bias, [tree[name] for name in gains]))[:, 0]

    layers = {name: tree for name, tree in params.items() if isinstance(tree, Mapping)}
    made = {name: constants(tree, "", "attention_norm", "mlp_norm") for name, tree in layers.items()}
    return made | {"final": constants(params, "final_", "final_norm")}
