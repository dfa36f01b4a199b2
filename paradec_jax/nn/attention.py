"""Attention of a window over a cached prefix and over itself, and who computes it.

::

    dense      all scores at once, [B, H, W, S + W]
    blocked    `QUERIES` queries at a time, or fewer (`SCORES`), their scores anew going backward;
               short windows as dense
    cudnn      cuDNN's program, which keeps no scores: where it is there (`nn.backend`), in 16 bits,
               for an even number of positions without a cache and at most 128 channels a head, a
               multiple of 8; elsewhere as blocked
    splash     JAX's Pallas kernel for TPUs, which keeps none either and skips what nobody sees: in
               long windows without a cache, causal or full by a rule, positions and channels
               multiples of 128; elsewhere as blocked

Of short windows on CUDA in bfloat16 `nn.window_kernel` is in the place of all but dense.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from paradec_jax.nn.backend import cudnn_attention
from paradec_jax.nn.cache import KV
from paradec_jax.nn.visibility import FULL, PrefixMask, Rule, Seen, mask_of
from paradec_jax.sharding.rules import row_axes, sizes_in_force

MASKED = float(jnp.finfo(jnp.float32).min)
QUERIES = 256  # of a long window whose scores are in memory at once
# That a device may hold at once, 512 MiB; many rows and heads take fewer queries at a time.
SCORES = 2**27
LANES = 128  # of a TPU: channels and positions of its kernel come in multiples of it


def attention(
    q: Float[Array, "B H W C"],
    window: KV,
    seen: Seen | None = None,
    prefix: KV | None = None,
    prefix_mask: PrefixMask | None = None,
    *,
    backend: str = "dense",
) -> Float[Array, "B H W C"]:
    """Softmax attention `softmax(q k^T / sqrt(C)) v` over prefix and window keys together, by a
    backend.

    Every backend gives the values and gradients of `attend`, up to the order of sums.

    Args:
      q: queries after bias and rotation.
      window: keys [B, G, C, W] and values [B, G, W, C] of the window itself.
      seen: which window keys a query sees, a mask or a rule; all of them for None.
      prefix: cached keys [B, G, C, S] and values [B, G, S, C], or None.
      prefix_mask: which cached positions a row sees, or each of its queries.
      backend: "dense", "blocked", "cudnn" or "splash", see above.
    """
    width, channels = q.shape[2:]
    seen = FULL if seen is None else seen
    alone = prefix is None or prefix_mask is None
    if alone:
        prefix = prefix_mask = None
    if backend == "cudnn" and alone and cudnn_attention():
        sixteen = q.dtype in (jnp.bfloat16, jnp.float16)
        if sixteen and channels % 8 == 0 and channels <= 128 and width % 2 == 0:
            return _cudnn(q, window, seen)
    if backend == "dense" or width <= QUERIES:
        return attend(q, window, mask_of(seen, width), prefix, prefix_mask)
    splits = backend == "splash" and alone and not (width % LANES or channels % LANES)
    if splits and isinstance(seen, Rule) and seen.name in ("causal", "full"):
        kernel = functools.partial(splash, seen=seen)
        elsewhere = functools.partial(_blocked, seen=seen, prefix=None, prefix_mask=None)
        return lax.platform_dependent(q, window, tpu=kernel, default=elsewhere)
    return _blocked(q, window, seen, prefix, prefix_mask)


def attend(
    q: Float[Array, "B H W C"],
    window: KV,
    window_mask: Bool[Array, "*B W K"],
    prefix: KV | None = None,
    prefix_mask: PrefixMask | None = None,
) -> Float[Array, "B H W C"]:
    """As `attention` under a mask of the window, all scores at once; q may be some of the window's
    queries.

    The prefix is read in place: neither its keys nor its values are joined with the window's, only
    the scores are. Scores, mask and softmax are at least float32. G key-value heads serve H = G * R
    query heads.
    """
    grouped = rearrange(q, "b (g r) w c -> b g r w c", g=window.k.shape[1])
    scale, wide = q.shape[-1] ** -0.5, jnp.promote_types(q.dtype, jnp.float32)

    def scores_of(keys: Array) -> Array:
        return jnp.einsum("bgrwc,bgcs->bgrws", grouped, keys, preferred_element_type=wide) * scale

    if window_mask.ndim == 3:
        window_mask = window_mask[:, None, None]
    scores = jnp.where(window_mask, scores_of(window.k), MASKED)
    size = 0
    if prefix is not None and prefix_mask is not None:
        size = prefix.k.shape[-1]
        each = prefix_mask if prefix_mask.ndim == 3 else prefix_mask[:, None]
        seen = jnp.where(each[:, None, None], scores_of(prefix.k), MASKED)
        scores = jnp.concatenate([seen, scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bgrws,bgsc->bgrwc", weights[..., size:], window.v)
    if prefix is not None and prefix_mask is not None:
        out = out + jnp.einsum("bgrws,bgsc->bgrwc", weights[..., :size], prefix.v)
    return rearrange(out.astype(q.dtype), "b g r w c -> b (g r) w c")


def once(rule: Rule, width: int, backend: str) -> Seen:
    """The rule, or its mask where the backend wants it whole: so it is made once for all layers."""
    whole = backend == "dense" or (backend != "cudnn" and width <= QUERIES)
    return rule.mask(width) if whole else rule


def _blocked(
    q: Float[Array, "B H W C"],
    window: KV,
    seen: Seen,
    prefix: KV | None,
    prefix_mask: PrefixMask | None,
) -> Float[Array, "B H W C"]:
    """As `attend`, of some queries at a time; from a rule each part makes what it sees."""
    width = q.shape[2]
    count = _at_a_time(q.shape, width + (0 if prefix is None else prefix.k.shape[-1]))
    extra = -width % count

    def split(rows: Array) -> Array:
        """[..., W, K] -> [parts, ..., queries, K]"""
        padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, extra), (0, 0)])
        return rearrange(padded, "... (n w) k -> n ... w k", w=count)

    each = prefix_mask if prefix_mask is not None and prefix_mask.ndim == 3 else None
    mask = jnp.arange(width + extra).reshape(-1, count) if isinstance(seen, Rule) else split(seen)
    parts = (split(q), mask, None if each is None else split(each))

    @jax.checkpoint
    def some(part: tuple[Array, Array, Array | None]) -> Array:
        queries, mask, of_prefix = part
        if isinstance(seen, Rule):
            mask = seen.rows(mask, width)
        return attend(queries, window, mask, prefix, prefix_mask if each is None else of_prefix)

    out = lax.map(some, parts)
    return rearrange(out, "n b h w c -> b h (n w) c")[:, :, :width]


def _at_a_time(shape: tuple[int, ...], keys: int) -> int:
    """Queries of a block: `QUERIES`, halved down to 32 while a device's scores exceed `SCORES`."""
    (rows, heads), sizes = shape[:2], sizes_in_force()
    tensor = sizes.get("tensor", 1)
    heads //= 1 if heads % tensor else tensor
    rows //= math.prod(sizes[axis] for axis in row_axes(rows, sizes) or ())
    count = QUERIES
    while count >= 64 and rows * heads * count * keys > SCORES:
        count //= 2
    return count


def _cudnn(q: Float[Array, "B H W C"], window: KV, seen: Seen) -> Float[Array, "B H W C"]:
    """Attention as cuDNN's program; it fails to trace where the default backend is not CUDA."""
    keys = rearrange(window.k, "b g c w -> b w g c")
    values = rearrange(window.v, "b g w c -> b w g c")
    rule, mask = seen.name if isinstance(seen, Rule) else "mask", None
    if rule not in ("causal", "full"):
        mask = mask_of(seen, q.shape[2])
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    queries = rearrange(q, "b h w c -> b w h c")
    out = jax.nn.dot_product_attention(
        queries, keys, values, mask=mask, is_causal=rule == "causal", implementation="cudnn"
    )
    return rearrange(out, "b w h c -> b h w c")


def splash(
    q: Float[Array, "B H W C"], window: KV, seen: Rule, *, interpret: bool = False
) -> Float[Array, "B H W C"]:
    """As `attend` of a window over itself; on a mesh each device computes its rows and heads.

    Args:
      seen: the rule "causal" or "full"; positions and channels are multiples of 128.
      interpret: whether the kernel runs as plain JAX, on any device: for tests.
    """

    def of_rows(q: Array, k: Array, v: Array) -> Array:
        return jax.vmap(_kernel(q.shape[1], q.shape[2], seen.name, interpret))(
            q * q.shape[-1] ** -0.5, k, v
        )

    sizes = sizes_in_force()
    if sizes:
        heads, tensor = (q.shape[1], window.v.shape[1]), sizes.get("tensor", 1)
        split = "tensor" if tensor > 1 and not any(n % tensor for n in heads) else None
        spec = P(row_axes(q.shape[0], sizes), split)
        of_rows = jax.shard_map(
            of_rows, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
        )
    return of_rows(q, rearrange(window.k, "b g c w -> b g w c"), window.v)


@functools.lru_cache
def _kernel(heads: int, width: int, rule: str, interpret: bool) -> Any:
    """The kernel of so many heads; making it goes through the mask once, outside of any trace."""
    # Imported late, which takes seconds and is seldom needed.
    from jax.experimental.pallas.ops.tpu import splash_attention

    one = (splash_attention.CausalMask if rule == "causal" else splash_attention.FullMask)(
        (width, width)
    )
    size = next(size for size in (512, 256, LANES) if width % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": size for name in names}
    with jax.ensure_compile_time_eval():
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([one] * heads),
            block_sizes=splash_attention.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
