"""Parameters before, while and after they train: their precision, which of them train, averages,
blends.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.objective import Objective, Sums

Params = Mapping[str, Any]
Whole = Callable[[Any, Any], dict[str, Any]]


def cast(part: Any, dtype: str, param_dtype: str, remat: str) -> Any:
    """A model or head in another precision.

    Args:
      part: the model or head.
      dtype, param_dtype: types of activations and of parameters.
      remat: what a backward pass computes anew.
    """
    config = dataclasses.replace(part.config, dtype=dtype, param_dtype=param_dtype, remat=remat)
    params = jax.tree.map(lambda x: x.astype(param_dtype), dict(part.params))
    return dataclasses.replace(part, config=config, params=params)


def split(model: Any, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters that train, and those that stay: below the upper layers, and of the vocabulary.

    Args:
      model: a model, or a residual head where all of it trains.
      share: share of the layers that train, the upper ones, at least one of them.

    Raises:
      ValueError: a share below 1 of a model whose layers are not in one row.
    """
    params = dict(model.params)
    if share == 1:
        return params, {}
    count = getattr(model.config, "layers", 0)
    if not count:
        raise ValueError(
            f"layers are no option of a model of {model.family}, whose layers are not in one row"
        )
    upper = {f"layer_{i}" for i in range(count - max(round(share * count), 1), count)}
    trained = {n: params.pop(n) for n in [*params] if n in upper or n.startswith("final")}
    return trained, params


def joined(loss: Objective, whole: Whole) -> Objective:
    """A loss of whole parameters as one of those that train.

    Its second argument is {"fixed": the parameters that stay, "frozen": that of the loss}; `whole`
    makes all parameters of those that stay and those that train.
    """

    def sums(trained: Params, frozen: Any, batch: Any, key: jax.Array) -> Sums:
        return loss.sums(whole(frozen["fixed"], trained), frozen["frozen"], batch, key)

    return Objective(sums, loss.value)


def blended(base: Any, trained: Any, share: float) -> Any:
    """base + share (trained - base), in float32 before it is rounded; what the base lacks is as
    trained (Wortsman et al., 2022, arXiv 2109.01903).
    """
    if isinstance(trained, Mapping):
        return {name: blended(base.get(name, x), x, share) for name, x in trained.items()}
    mean = (1 - share) * base.astype(jnp.float32) + share * trained.astype(jnp.float32)
    return mean.astype(trained.dtype)
