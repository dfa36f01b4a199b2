"""What a position of the recurrent-depth network leaves for later ones.

- "shared": one slot a layer, the newest recurrence wins (the paper's cache with budget 1).
- "full": one slot a recurrence; positions that stopped earlier are not seen by deeper queries.
- "latest": as "full", but a position that stopped earlier is seen by its last recurrence.

Prelude and coda run once a position and have one slot in any mode.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn.cache import Layers
from paradec_jax.records import pytree

CACHE_MODES = ("shared", "full", "latest")


@pytree
class RecurrentKV:
    """Keys and values of every layer, of a whole buffer (the cache) or of one window.

    Attributes:
      prelude, coda: a KV for each layer.
      core: a KV for each layer, after the rows an axis of R slots unless recurrences share one (the
        newest wins).
      depth: recurrences that each position has done, int32: [B, S] of a cache, [B] of a window.
    """

    prelude: Layers
    core: Layers
    coda: Layers
    depth: Int[Array, "..."]


@pytree
class RecurrentCache:
    """Keys and values of a whole buffer, and the latent that each position starts from."""

    kv: RecurrentKV
    initial: Float[Array, "B S D"]


def empty(
    config: RecurrentDepthConfig, slots: tuple[int, ...], batch: int, size: int, dtype: jnp.dtype
) -> RecurrentKV:
    """Room for `size` positions a row; `slots` is () or (R,)."""

    def part(layers: int, slots: tuple[int, ...] = ()) -> Layers:
        return tuple(
            kv_cache.empty(batch, config.heads, size, config.head_dim, dtype, slots)
            for _ in range(layers)
        )

    return RecurrentKV(
        part(config.prelude_layers),
        part(config.core_layers, slots),
        part(config.coda_layers),
        jnp.zeros(batch, jnp.int32),
    )


def seen(
    mode: str, cache: RecurrentKV, prefix_mask: Bool[Array, "B *W S"], index: Int[Array, ""] | int
) -> tuple[Layers, Bool[Array, "B *W S"]]:
    """The core's keys and values that recurrence `index` may look at, and at which positions."""
    prefix = cache.core
    if mode != "shared":
        prefix = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, 1, keepdims=False), prefix
        )
    if mode == "full":
        deep = cache.depth > index
        prefix_mask = prefix_mask & (deep if prefix_mask.ndim == 2 else deep[:, None])
    return prefix, prefix_mask


def store(
    mode: str,
    window: RecurrentKV,
    core: Layers,
    index: Int[Array, ""] | int,
    rows: Bool[Array, "B"] | None,
) -> RecurrentKV:
    """The window with what recurrence `index` of the core has left in these rows, in all if None."""
    depth = jnp.broadcast_to(jnp.asarray(index + 1, jnp.int32), window.depth.shape)
    if rows is not None:
        depth = jnp.where(rows, depth, window.depth)

    def put(old: Array, fresh: Array) -> Array:
        slot = old if mode == "shared" else lax.dynamic_index_in_dim(old, index, 1, keepdims=False)
        new = fresh if rows is None else jnp.where(rows[:, None, None, None], fresh, slot)
        return new if mode == "shared" else lax.dynamic_update_index_in_dim(old, new, index, 1)

    return dataclasses.replace(window, core=jax.tree.map(put, window.core, core), depth=depth)


def write(mode: str, cache: RecurrentKV, window: RecurrentKV, at: Int[Array, "B"]) -> RecurrentKV:
    """The cache with a window stored at positions `at .. at + W - 1` of each row."""
    if mode == "latest":
        # Each row's last recurrence is copied into the slots that it did not reach.
        last = jnp.minimum(jnp.arange(window.core[0].k.shape[1]), window.depth[:, None] - 1)
        index = last[:, :, None, None, None]
        filled = jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=1), window.core)
        window = dataclasses.replace(window, core=filled)
    written = kv_cache.each_kv(lambda old, new: kv_cache.write(old, new, at), cache, window)
    if mode != "full":
        return written
    done = jnp.broadcast_to(window.depth[:, None], (at.shape[0], window.prelude[0].v.shape[-2]))
    depth = jax.vmap(lambda row, new, p: lax.dynamic_update_slice(row, new, (p,)))(
        cache.depth, done, at
    )
    return dataclasses.replace(written, depth=depth)
