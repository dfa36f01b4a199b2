"""A residual head that begins as the first layers of its backbone."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.models.residual_head import init_params


def inherited(config: ResidualHeadConfig, key: Array, backbone: Any) -> dict[str, Any]:
    """Parameters whose residual begins at zero, and whose blocks are copies of the backbone's first ones.

    These read the embeddings that they know: `fusion` begins as [1 ; draw], `embedding_norm` at the size of an
    embedding.

    Args:
      config: the shape.
      key: random key; the same key gives the same draws.
      backbone: parameters of the backbone.

    Raises:
      ValueError: a backbone of fewer layers or of other shapes.
    """
    names = [f"layer_{i}" for i in range(config.layers)]
    if missing := [name for name in names if name not in backbone]:
        raise ValueError(
            f"init inherited needs a backbone with {', '.join(missing)} for {config.layers} layers"
        )
    params = init_params(config, key)
    mine, theirs = ([tree[name] for name in names] for tree in (params, backbone))
    why = "init inherited needs a backbone whose layers have the shapes of the head's"
    chex.assert_trees_all_equal_shapes(mine, theirs, custom_message=why, exception_type=ValueError)
    chex.assert_axis_dimension(
        backbone["embedding"], 1, config.width, custom_message=why, exception_type=ValueError
    )
    table, dtype = backbone["embedding"].astype(jnp.float32), config.param_dtype
    size = jnp.sqrt(jnp.mean(jnp.square(table)))
    return {
        **params,
        **{name: jax.tree.map(lambda x: jnp.array(x, dtype), backbone[name]) for name in names},
        "embedding_norm": jnp.full((config.width,), size, dtype),
        "fusion": params["fusion"].at[: config.width].set(jnp.eye(config.width, dtype=dtype)),
    }
