"""What stub networks share: `Stub`, their base, a cache of tokens and positions, and a probe of
what really ran.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Prefix, Prepared
from paradec_jax.decode.rules.windows import pad_slots
from paradec_jax.nn import masks

Probe = Callable[[str], None]
Ids = Int[Array, "B W"]
Inputs = Int[Array, "B W"] | Float[Array, "B W E"]  # tokens, or vectors in their place
Mask = Bool[Array, "*B W W"] | None
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
    """Parameters of a stub that change what it says: one program then runs on sound and on broken
    networks.

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


class Stub:
    """Base of a stub network: causal, without blocks, counters and cache, unless a subclass says
    otherwise.

    A subclass is a frozen dataclass with `vocab_size` and `max_length`. `sharpness` is the logit of
    the predicted token; `probe` is called on the host with a counter's name whenever what it counts
    really runs.
    """

    counters: ClassVar[Any] = ()
    subs: ClassVar[Any] = True
    visibility: ClassVar[Any] = "causal"
    block: ClassVar[Any] = None
    sharpness: Any
    vocab_size: Any
    probe: Probe | None = None

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return params if isinstance(params, Prepared) else Prepared(params)

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """`sharpness` at the predicted token, which is the first head input; 0 elsewhere."""
        return said(params, self.sharpness * self.one_hot(hidden))

    def one_hot(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """1 at the predicted token, 0 elsewhere."""
        return jax.nn.one_hot(jnp.round(hidden[..., 0]).astype(jnp.int32), self.vocab_size)

    def embedding(self, params: Any) -> Float[Array, "V 1"]:
        """The vector of a token: its number."""
        return jnp.arange(self.vocab_size, dtype=jnp.float32)[:, None]

    def tokens_of(self, inputs: Inputs) -> Ids:
        """Tokens; of a vector the nearest one."""
        return inputs if inputs.ndim == 2 else jnp.round(inputs[..., 0]).astype(jnp.int32)

    def report(self, counter: str) -> None:
        """Calls the probe when this place of the program really runs."""
        if self.probe is not None:
            jax.debug.callback(functools.partial(self.probe, counter))


class CachedStub(Stub):
    """A stub with a cache; by default of tokens and positions, addressed by absolute position."""

    def init_cache(self, keys: Array, size: int) -> TokenKV:
        """An empty cache; its tokens and positions are buffers of their own."""
        return TokenKV(*(jnp.zeros((len(keys), size), jnp.int32) for _ in range(2)))

    def write(self, cache: Any, window: Any, at: Int[Array, "B"]) -> Any:
        """The cache with a window stored at slots `at .. at + W - 1`."""
        return write(cache, window, at)

    def pick(self, window: Any, start: Int[Array, "B"], width: int) -> Any:
        """Slots `start .. start + width - 1` of each row's window."""

        def of_row(row: Array, slot: Array) -> Array:
            return lax.dynamic_slice_in_dim(row, slot, width)

        return jax.tree.map(lambda x: jax.vmap(of_row)(x, start), window)

    def take(self, window: Any, slots: Int[Array, "B _"]) -> Any:
        """These slots of each row's window, zeros for one that is not in it."""

        def of_row(row: Array, slots: Array) -> Array:
            return row.at[slots].get(mode="fill", fill_value=0)

        return jax.tree.map(lambda x: jax.vmap(of_row)(x, slots), window)

    def widen(self, window: Any, width: int) -> Any:
        """The window with zeros after its slots, up to `width`."""
        return jax.tree.map(lambda x: pad_slots(x, width), window)


def write(cache: Any, window: Any, at: Int[Array, "B"]) -> Any:
    """Leaves [B, S, ...] with those of a window stored at slots `at .. at + W - 1`."""

    def of_row(row: Array, new: Array, slot: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(row, new, slot, 0)

    return jax.tree.map(lambda old, new: jax.vmap(of_row)(old, new, at), cache, window)


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
