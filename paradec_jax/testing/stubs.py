"""What stub networks share: a cache of tokens and positions, one-hot scores, a probe of what really ran."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Prefix, Prepared
from paradec_jax.decode.rules.windows import pad_slots
from paradec_jax.nn import masks

Probe = Callable[[str], None]
ZERO, ONE = np.float32(0), np.float32(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenKV:
    """Input tokens and their positions, of a whole buffer (S) or of one window (W)."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spoilt:
    """Parameters of a stub that change what it says: one program then runs on sound and on broken networks.

    Attributes:
      scale, shift: logits x, or the residuals of a head, become `scale x + shift`.
      state: number added to the latents of a recurrent stub in each recurrence.
    """

    scale: Any = ONE
    shift: Any = ZERO
    state: Any = ZERO


def spoilt(params: Any) -> Spoilt:
    """The parameters of a stub; None, which changes nothing, is the default of `Spoilt`."""
    given = params.params if isinstance(params, Prepared) else params
    return given if isinstance(given, Spoilt) else Spoilt()


def said(params: Any, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` as these parameters change it."""
    how = spoilt(params)
    return how.scale * x + how.shift


def prepared(params: Any) -> Prepared:
    """The parameters as they are, marked as prepared."""
    return params if isinstance(params, Prepared) else Prepared(params)


def report(probe: Probe | None, counter: str) -> None:
    """Tells the probe, on the host and whenever this place of the program really runs, what is counted there."""
    if probe is not None:
        jax.debug.callback(functools.partial(probe, counter))


def empty(batch: int, size: int) -> TokenKV:
    """An empty cache, its tokens and positions buffers of their own."""
    return TokenKV(jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), jnp.int32))


def write(cache: Any, window: Any, at: Int[Array, "B"]) -> Any:
    """Leaves [B, S, ...] with those of a window stored at slots `at .. at + W - 1`."""

    def of_row(row: Array, new: Array, slot: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(row, new, slot, 0)

    return jax.tree.map(lambda old, new: jax.vmap(of_row)(old, new, at), cache, window)


def pick(window: Any, start: Int[Array, "B"], width: int) -> Any:
    """Slots `start .. start + width - 1` of each row's window."""

    def of_row(row: Array, slot: Array) -> Array:
        return lax.dynamic_slice_in_dim(row, slot, width)

    return jax.tree.map(lambda x: jax.vmap(of_row)(x, start), window)


def widen(window: Any, width: int) -> Any:
    """Leaves [B, W, ...] with zeros after their slots, up to `width`."""
    return jax.tree.map(lambda x: pad_slots(x, width), window)


def keys_seen(
    own: TokenKV, prefix: Prefix | None, mask: Bool[Array, "*B W W"]
) -> tuple[TokenKV, Bool[Array, "B W K"]]:
    """Tokens and positions of cache and window side by side, and which of them each query sees."""
    batch, width = own.tokens.shape
    seen = jnp.broadcast_to(mask, (batch, width, width))
    if prefix is None or prefix.visible is None:
        return own, seen
    size = prefix.kv.tokens.shape[1]
    cached = masks.visible(prefix.visible, size)
    cached = cached if cached.ndim == 3 else cached[:, None]
    seen = jnp.concatenate([jnp.broadcast_to(cached, (batch, width, size)), seen], axis=-1)
    return jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), prefix.kv, own), seen


def one_hot_logits(
    predicted: Float[Array, "*shape"], vocab_size: int, sharpness: Any
) -> Float[Array, "*shape V"]:
    """`sharpness` at the predicted token, 0 elsewhere."""
    return sharpness * jax.nn.one_hot(jnp.round(predicted).astype(jnp.int32), vocab_size)
