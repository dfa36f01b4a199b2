"""Everything a training run needs to go on from where it stopped, except the position in the data."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a training run, a pytree.

    Attributes:
      step: int32 scalar, updates applied so far.
      params: parameters, a nested dict.
      ema: moving average of `params` in float32, or None.
      opt_state: state of the optax optimizer.
      key: typed PRNG key of the run. It never changes: step t uses fold_in(key, t).
    """

    step: jax.Array
    params: PyTree
    ema: PyTree | None
    opt_state: PyTree
    key: jax.Array

    @classmethod
    def create(
        cls, params: PyTree, optimizer: optax.GradientTransformation, key: jax.Array, *, ema: bool = False
    ) -> "TrainState":
        """The state before the first step. Copies `params` and `key`, since the train step donates its state.

        Raises:
          TypeError: if `key` is not one typed PRNG key (`jax.random.key(seed)`).
        """
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
            given = f"{key.dtype}{list(key.shape)}"
            raise TypeError(f"key must be one typed PRNG key, as jax.random.key(seed) makes, not {given}")
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema=jax.tree.map(_float32_copy, params) if ema else None,
            opt_state=optimizer.init(params),
            key=jax.random.clone(key),
        )


def update_ema(ema: PyTree, params: PyTree, step: jax.Array, decay: float) -> PyTree:
    """One update of the moving average, its decay warmed up so that the initial values are soon forgotten.

        d_t = min(decay, (1 + t) / (10 + t)),    ema <- d_t ema + (1 - d_t) params

    Args:
      ema: average after t updates, float32.
      params: parameters after update t + 1.
      step: t, an int32 scalar.
      decay: limit of d_t, in [0, 1).
    """
    d = jnp.minimum(decay, (1 + step) / (10 + step)).astype(jnp.float32)
    return jax.tree.map(lambda e, p: d * e + (1 - d) * p.astype(e.dtype), ema, params)


def _float32_copy(x: jax.Array) -> jax.Array:
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.array(x, dtype, copy=True)
