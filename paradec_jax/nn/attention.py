"""Attention of a window over a cached prefix and over itself."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from paradec_jax.nn.cache import KV

MASKED = float(jnp.finfo(jnp.float32).min)


def attend(
    q: Float[Array, "B H W C"],
    window: KV,
    window_mask: Bool[Array, "*B W W"],
    prefix: KV | None = None,
    prefix_mask: Bool[Array, "B S"] | Bool[Array, "B W S"] | None = None,
) -> Float[Array, "B H W C"]:
    """Softmax attention `softmax(q k^T / sqrt(C)) v` over prefix and window keys together.

    The prefix is read in place: neither its keys nor its values are joined with the window's, only the scores
    are. Scores, mask and softmax are at least float32. G key-value heads serve H = G * R query heads.

    Args:
      q: queries after bias and rotation.
      window: keys [B, G, C, W] and values [B, G, W, C] of the window itself.
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
