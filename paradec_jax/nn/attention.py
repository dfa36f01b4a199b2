"""Attention of a window over a cached prefix and over itself, or over itself alone and whole."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from paradec_jax.nn import masks
from paradec_jax.nn.backend import cudnn_attention
from paradec_jax.nn.cache import KV

MASKED = float(jnp.finfo(jnp.float32).min)
QUERIES = 256  # of a long window whose scores are in memory at once, outside cuDNN


def attend(
    q: Float[Array, "B H W C"],
    window: KV,
    window_mask: Bool[Array, "*B W K"],
    prefix: KV | None = None,
    prefix_mask: Bool[Array, "B S"] | Bool[Array, "B W S"] | None = None,
) -> Float[Array, "B H W C"]:
    """Softmax attention `softmax(q k^T / sqrt(C)) v` over prefix and window keys together.

    The prefix is read in place: neither its keys nor its values are joined with the window's, only the scores
    are. Scores, mask and softmax are at least float32. G key-value heads serve H = G * R query heads.

    Args:
      q: queries after bias and rotation.
      window: keys [B, G, C, K] and values [B, G, K, C] of the window itself; K = W unless q are some of its queries.
      window_mask: which window keys a query sees.
      prefix: cached keys [B, G, C, S] and values [B, G, S, C], or None.
      prefix_mask: which cached positions a row sees, or each of its queries.
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
    return rearrange(out, "b g r w c -> b (g r) w c")


def attend_all(
    q: Float[Array, "B H W C"], window: KV, mask: Bool[Array, "*B W W"] | None = None
) -> Float[Array, "B H W C"]:
    """As `attend` of a window over itself, without ever holding all its scores where the window is long.

    On CUDA, cuDNN's attention computes it in 16 bits (`nn.backend.cudnn_attention`), which keeps no scores at all;
    elsewhere, and in float32, `QUERIES` queries are taken at a time and their scores computed anew going backward.

    Args:
      q: queries after the rotation.
      window: keys [B, G, C, W] and values [B, G, W, C].
      mask: which keys a query sees; all of them by default.
    """
    width, channels = q.shape[2:]
    sixteen = q.dtype in (jnp.bfloat16, jnp.float16)
    if cudnn_attention() and sixteen and channels % 8 == 0 and channels <= 128 and width % 2 == 0:
        return _cudnn(q, window, mask)
    mask = masks.full(width) if mask is None else mask
    if width <= QUERIES:
        return attend(q, window, mask)
    extra = -width % QUERIES
    queries = jnp.pad(q, [(0, 0), (0, 0), (0, extra), (0, 0)])
    rows = jnp.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, extra), (0, 0)])

    @jax.checkpoint
    def some(part: tuple[Array, Array]) -> Array:
        return attend(part[0], window, part[1])

    parts = rearrange(queries, "b h (n w) c -> n b h w c", w=QUERIES)
    out = lax.map(some, (parts, rearrange(rows, "... (n w) s -> n ... w s", w=QUERIES)))
    return rearrange(out, "n b h w c -> b h (n w) c")[:, :, :width]


def _cudnn(q: Array, window: KV, mask: Array | None) -> Array:
    """Attention as cuDNN's program; it fails to trace where the default backend is not CUDA."""
    keys = rearrange(window.k, "b g c w -> b w g c")
    values = rearrange(window.v, "b g w c -> b w g c")
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    queries = rearrange(q, "b h w c -> b w h c")
    out = jax.nn.dot_product_attention(queries, keys, values, mask=mask, implementation="cudnn")
    return rearrange(out, "b w h c -> b h w c")
