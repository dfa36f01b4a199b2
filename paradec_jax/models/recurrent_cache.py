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
from paradec_jax.nn.cache import KV, Layers

CACHE_MODES = ("shared", "full", "latest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentKV:
    """Keys and values of every layer, of a whole buffer (the cache) or of one window.

    Attributes:
      prelude, coda: a KV for each layer.
      core: a KV for each layer, after the rows an axis of R slots unless recurrences share one (the newest wins).
      depth: recurrences that each position has done, int32: [B, S] of a cache, [B] of a window.
    """

    prelude: Layers
    core: Layers
    coda: Layers
    depth: Int[Array, "..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """Keys and values of a whole buffer, and the latent state that each position starts from, [B, S, D]."""

    kv: RecurrentKV
    initial: Float[Array, "B S D"]


def empty(
    config: RecurrentDepthConfig, slots: tuple[int, ...], batch: int, size: int, depth_shape: tuple[int, ...]
) -> RecurrentKV:
    """Room for `size` positions a row; `slots` is () or (R,), `depth_shape` that of a cache or of a window."""

    def part(layers: int, slots: tuple[int, ...] = ()) -> Layers:
        dtype = jnp.dtype(config.dtype)
        return tuple(
            kv_cache.empty(batch, config.heads, size, config.head_dim, dtype, slots) for _ in range(layers)
        )

    return RecurrentKV(
        part(config.prelude_layers),
        part(config.core_layers, slots),
        part(config.coda_layers),
        jnp.zeros(depth_shape, jnp.int32),
    )


def seen(
    mode: str, cache: RecurrentKV, prefix_mask: Bool[Array, "B *W S"], index: Int[Array, ""] | int
) -> tuple[Layers, Bool[Array, "B *W S"]]:
    """The core's keys and values that recurrence `index` may look at, and at which positions."""
    prefix = cache.core
    if mode != "shared":
        prefix = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 1, keepdims=False), prefix)
    if mode == "full":
        deep = cache.depth > index
        prefix_mask = prefix_mask & (deep if prefix_mask.ndim == 2 else deep[:, None])
    return prefix, prefix_mask


def store(
    mode: str, window: RecurrentKV, core: Layers, index: Int[Array, ""] | int, rows: Bool[Array, "B"] | None
) -> RecurrentKV:
    """The window with what recurrence `index` of the core has left in these rows, in all if None."""
    depth = jnp.broadcast_to(jnp.asarray(index + 1, jnp.int32), window.depth.shape)
    if rows is not None:
        depth = jnp.where(rows, depth, window.depth)

    def put(old: Array, fresh: Array) -> Array:
        slot = old if mode == "shared" else lax.dynamic_index_in_dim(old, index, 1, keepdims=False)
        kept = fresh if rows is None else jnp.where(rows[:, None, None, None], fresh, slot)
        return kept if mode == "shared" else lax.dynamic_update_index_in_dim(old, kept, index, 1)

    return dataclasses.replace(window, core=jax.tree.map(put, window.core, core), depth=depth)


def write(mode: str, cache: RecurrentKV, window: RecurrentKV, at: Int[Array, "B"]) -> RecurrentKV:
    """The cache with a window stored at positions `at .. at + W - 1` of each row."""
    core = window.core
    if mode == "latest":
        core = tuple(_fill_from_last(kv, window.depth) for kv in core)

    def layers(old: Layers, new: Layers) -> Layers:
        return tuple(kv_cache.write(a, b, at) for a, b in zip(old, new, strict=True))

    depth = cache.depth
    if mode == "full":
        width = window.prelude[0].v.shape[-2]
        done = jnp.broadcast_to(window.depth[:, None], (at.shape[0], width))
        depth = jax.vmap(lambda row, new, p: lax.dynamic_update_slice(row, new, (p,)))(depth, done, at)
    return RecurrentKV(
        layers(cache.prelude, window.prelude),
        layers(cache.core, core),
        layers(cache.coda, window.coda),
        depth,
    )


def widen(window: RecurrentKV, width: int) -> RecurrentKV:
    """The window with room for `width` positions, the new ones zero."""

    def layers(part: Layers) -> Layers:
        return tuple(kv_cache.widen(kv, width) for kv in part)

    return RecurrentKV(layers(window.prelude), layers(window.core), layers(window.coda), window.depth)


def pick(window: RecurrentKV, start: Int[Array, "B"], width: int) -> RecurrentKV:
    """Positions `start .. start + width - 1` of each row's window."""

    def layers(part: Layers) -> Layers:
        return tuple(kv_cache.pick(kv, start, width) for kv in part)

    return RecurrentKV(layers(window.prelude), layers(window.core), layers(window.coda), window.depth)


def _fill_from_last(kv: KV, depth: Int[Array, "B"]) -> KV:
    """Copies each row's last recurrence into the slots it did not reach, of a window with R slots."""
    index = jnp.minimum(jnp.arange(kv.k.shape[1]), depth[:, None] - 1)[:, :, None, None, None]
    return KV(*(jnp.take_along_axis(x, index, axis=1) for x in kv))
