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
      ema_count: int32 scalar, updates of that average since it began, or None.
      opt_state: state of the optax optimizer.
      key: typed PRNG key of the run. It never changes: step t uses fold_in(key, t).
      teacher: parameters of the teacher of a run in rounds, or None.
      round: int32 scalar, the round, counted from 0, or None.
    """

    step: jax.Array
    params: PyTree
    ema: PyTree | None
    opt_state: PyTree
    key: jax.Array
    ema_count: jax.Array | None = None
    teacher: PyTree | None = None
    round: jax.Array | None = None

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        *,
        ema: bool = False,
        teacher: PyTree | None = None,
    ) -> "TrainState":
        """The state before the first step. Copies what it is given, since the train step donates its state.

        Raises:
          TypeError: if `key` is not one typed PRNG key (`jax.random.key(seed)`).
        """
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
            given = f"{key.dtype}{list(key.shape)}"
            raise TypeError(f"key must be one typed PRNG key, as jax.random.key(seed) makes, not {given}")
        params, teacher = (
            jax.tree.map(lambda x: jnp.array(x, copy=True), tree) for tree in (params, teacher)
        )
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema=jax.tree.map(float32_copy, params) if ema else None,
            opt_state=optimizer.init(params),
            key=jax.random.clone(key),
            ema_count=jnp.zeros((), jnp.int32) if ema else None,
            teacher=teacher,
            round=None if teacher is None else jnp.zeros((), jnp.int32),
        )

    @classmethod
    def shape(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        *,
        ema: bool = False,
        teacher: PyTree | None = None,
    ) -> "TrainState":
        """What `create` makes of the same arguments, as `shapes`, but for the key.

        It makes none of the arrays unless the caller has placed some of `params` or `teacher` on devices, where the
        optimizer alone knows the place of its own.

        Raises:
          TypeError: as `create` does.
        """
        placed = any(getattr(x, "committed", False) for x in jax.tree.leaves((params, teacher)))

        def make(params: PyTree, teacher: PyTree) -> "TrainState":
            return cls.create(params, optimizer, key, ema=ema, teacher=teacher)

        made = make(params, teacher) if placed else jax.eval_shape(make, params, teacher)
        return dataclasses.replace(shapes(made), key=key)


def shapes(tree: PyTree) -> PyTree:
    """Shape and dtype of every array, and its sharding where it is bound to devices."""

    def shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        bound = x.sharding if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=bound)

    return jax.tree.map(shape_of, tree)


def update_ema(
    ema: PyTree, params: PyTree, count: jax.Array | int, decay: float, *, warmup: bool = True
) -> PyTree:
    """One update of the moving average, its decay warmed up so that the initial values are soon forgotten.

        d_n = min(decay, (1 + n) / (10 + n)),    ema <- d_n ema + (1 - d_n) params

    so that the first update, n = 1, keeps 2/11 of the initial values, and a decay of 0.9999 is reached after 90,000
    updates: in shorter runs the warm-up alone rules.

    Args:
      ema: average after n - 1 updates, float32.
      params: parameters after the update.
      count: n - 1, updates of the average so far.
      decay: limit of d_n, in [0, 1).
      warmup: whether d_n grows; it is `decay` from the first update on otherwise.
    """
    n = jnp.asarray(count) + 1
    d = jnp.float32(decay)
    if warmup:
        d = jnp.minimum(d, (1 + n) / (10 + n)).astype(jnp.float32)
    return jax.tree.map(lambda e, p: d * e + (1 - d) * p.astype(e.dtype), ema, params)


def float32_copy(x: jax.Array) -> jax.Array:
    """A copy of its own, floating point numbers in float32."""
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.array(x, dtype, copy=True)
