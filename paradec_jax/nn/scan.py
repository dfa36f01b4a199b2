"""Blocks of one shape as a loop over their stacked parameters, so that one of them is compiled and not each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from paradec_jax.nn.cache import KV

Body = Callable[[Float[Array, "B W D"], Any, Any], tuple[Float[Array, "B W D"], Any]]


def scanned(
    body: Body, x: Float[Array, "B W D"], layers: Sequence[Any], dtype: str, each: Any = None
) -> tuple[Float[Array, "B W D"], Any]:
    """`x` after `x, kept = body(x, params, own)` of every layer, and what they kept, stacked [N, ...].

    Matrices of attention and MLPs are cast to the dtype of their products before they are stacked: on a mesh those of
    a layer are then gathered in that dtype, in its turn of the loop.

    Args:
      body: calls a block on its parameters.
      x: the stream.
      layers: parameters of each block, of equal shapes.
      dtype: of the products.
      each: what else a layer has of its own, stacked [N, ...].
    """

    def stack(path: tuple[Any, ...], *leaves: Array) -> Array:
        part = jax.tree_util.keystr(path, simple=True, separator="/")
        product = leaves[0].ndim > 1 and part.startswith(("attention/", "mlp/"))
        return jnp.stack([leaf.astype(dtype) if product else leaf for leaf in leaves])

    stacked = jax.tree_util.tree_map_with_path(stack, *layers)

    def turn(x: Array, layer: tuple[Any, Array]) -> tuple[Array, Any]:
        return body(x, *layer)

    return lax.scan(turn, x, (stacked, each))


def stacked_cache(cache: Sequence[KV] | None) -> KV | None:
    """Keys and values of all layers, stacked [N, ...]."""
    return None if cache is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *cache)


def of_layers(kept: KV, count: int) -> tuple[KV, ...]:
    """Stacked keys and values of all layers as those of each."""
    return tuple(KV(kept.k[i], kept.v[i]) for i in range(count))
