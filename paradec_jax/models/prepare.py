"""Parameters as decoding loops want them: matrices cast, the tied head laid out, modulations made, once."""

import functools
import re
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

PRODUCTS = re.compile("(^|/)(attention|mlp)/|^(adapter|fusion|head)$")  # paths of matrices that meet rows


def prepare_params(config: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree for the config's module with `prepared=True`, never for training.

    Matrices are cast to the dtype of their products. A tied output matrix is laid out as `head` [D, V] where it must
    be cast, and with layouts for the CPU (`nn.backend`). At noise level zero a denoiser's modulations are constants
    of its weights: float32 `layer_i/constants` [6, D] and `final_constants` [2, D] take the place of noise map, norms
    and modulations.
    """
    dtype = jnp.dtype(config.dtype)
    if isinstance(config, MaskedDiffusionConfig):
        kept = {key: params[key] for key in ("embedding", "head", "head_bias")}
        made = _constants(params)
        kept["final_constants"] = made.pop("final")
        for name, constants in made.items():
            parts = {part: params[name][part] for part in ("attention", "mlp")}
            kept[name] = {"constants": constants, **parts}
        return _cast(kept, dtype)
    kept = _cast(params, dtype)
    if getattr(config, "tie_embeddings", False) and (cpu_layouts() or params["embedding"].dtype != dtype):
        kept["head"] = _laid_out(params["embedding"], dtype)
    return kept


def _cast(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The tree with its matrices in the dtype of their products; every other leaf as it is.

    For the CPU an embedding is at least float32: its backend casts a whole table in bfloat16 to read a row of it.
    """

    def wanted(path: tuple[Any, ...], leaf: Any) -> Any:
        part = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.ndim > 1 and PRODUCTS.search(part):
            return dtype
        table = part == "embedding" and cpu_layouts()
        return jnp.promote_types(leaf.dtype, jnp.float32) if table else leaf.dtype

    flat, tree = jax.tree_util.tree_flatten_with_path(dict(params))
    dtypes = [wanted(*each) for each in flat]
    others = {i: to for i, (to, (_, leaf)) in enumerate(zip(dtypes, flat, strict=True)) if to != leaf.dtype}
    if not others:
        return dict(params)
    made = dict(zip(others, _astype([flat[i][1] for i in others], tuple(others.values())), strict=True))
    return jax.tree.unflatten(tree, [made.get(i, leaf) for i, (_, leaf) in enumerate(flat)])


@functools.partial(jax.jit, static_argnums=1)
def _astype(leaves: list[Array], dtypes: tuple[Any, ...]) -> list[Array]:
    """All of them in one program."""
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _laid_out(embedding: Array, dtype: Any) -> Array:
    # The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one; the barrier keeps it
    # from folding the transposition into the product.
    return lax.optimization_barrier(embedding.T.astype(dtype))


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
