"""A network that knows the law of its texts, a Markov chain, whatever it sees of one.

::

    p(x_t = v | seen)  ~  T^(t - l)[x_l, v] T^(r - t)[v, x_r]        l, r the nearest positions that it sees

That is forward-backward, of which two powers of the transitions T are left, since what lies beyond
the nearest says nothing more. Where none is before, pi[v] stands in the place of the first factor;
where none is after, 1 in that of the second. It sees what causal, block or full attention lets it:
under full attention it is the perfect denoiser. What a decoder's texts lose against the law is then
the decoder's own doing.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float64, Int

from experiments.tasks.chains import MarkovLaw
from paradec_jax.config import TokenSpec
from paradec_jax.decode import Prefix
from paradec_jax.decode.machine import Forward
from paradec_jax.decode.machine.network import Prepared
from paradec_jax.decode.rules import pad_slots, positions_of, window
from paradec_jax.nn import masks

NEVER = -1e9  # logit of the mask


@dataclasses.dataclass(frozen=True)
class Chain(MarkovLaw):
    """A chain of which every transition is given.

    Attributes:
      rows: probabilities of the symbols after each symbol.
      length: L, symbols of a text.
    """

    rows: tuple[tuple[float, ...], ...]
    length: int

    @property
    def symbols(self) -> int:
        """V, symbols; the mask is token V."""
        return len(self.rows)

    @functools.cached_property
    def transitions(self) -> Float64[np.ndarray, "V V"]:
        """T, by symbol and the next one."""
        return np.asarray(self.rows, np.float64)


@dataclasses.dataclass(frozen=True)
class KnownLaw:
    """A network without parameters whose cache holds tokens.

    Attributes:
      chain: the law; its length is that of the longest text.
      visibility: "causal", "block" or "full".
      block: length of a block under "block".
      alignment: "own", or "next" for logits at p about p + 1.
    """

    chain: Any
    visibility: str = "full"
    block: int | None = None
    alignment: str = "own"
    counters: ClassVar[tuple[str, ...]] = ()
    subs: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """The symbols and the mask."""
        return self.chain.symbols + 1

    @property
    def max_length(self) -> int:
        """Longest text."""
        return self.chain.length

    @property
    def spec(self) -> TokenSpec:
        """The mask is the last token; nothing ends a text."""
        return TokenSpec(mask=self.chain.symbols, alignment=self.alignment)

    def prepare(self, params: Any) -> Prepared:
        """Nothing, marked as prepared."""
        return params if isinstance(params, Prepared) else Prepared(params)

    def sees(self, positions: Int[Array, "B W"]) -> Bool[Array, "B W W"]:
        """Which of a window's positions each of them sees."""
        at = positions if self.block is None else positions // self.block
        if self.visibility == "full":
            at = jnp.zeros_like(at)
        return at[:, :, None] >= at[:, None]

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head inputs are log posteriors."""
        del params
        (rows, width), tokens, at = inputs.shape, inputs, positions
        seen = jnp.broadcast_to(
            self.sees(positions) if mask is None else mask, (rows, width, width)
        )
        if prefix is not None and prefix.visible is not None:
            places = positions_of(prefix.kv)
            visible = masks.visible(prefix.visible, places.shape[1])
            visible = visible if visible.ndim == 3 else visible[:, None]
            visible = jnp.broadcast_to(visible, (rows, width, places.shape[1]))
            tokens, at = (jnp.concatenate(x, 1) for x in ((prefix.kv, tokens), (places, at)))
            seen = jnp.concatenate([visible, seen], axis=2)
        seen &= (tokens != self.chain.symbols)[:, None]
        target, far = positions[..., None] + (self.alignment == "next"), 2 * self.chain.length
        at = at[:, None]
        left = jnp.max(jnp.where(seen & (at <= target), at, -1), axis=2)
        right = jnp.min(jnp.where(seen & (at >= target), at, far), axis=2)

        def factor(place: Array, there: Array, powers: Any, without: Any) -> Array:
            here = seen & (at == place[..., None])
            symbol = jnp.max(jnp.where(here, tokens[:, None], 0), axis=2)
            distance = jnp.clip(jnp.abs(target[..., 0] - place), 0, self.chain.length - 1)
            powers = jnp.asarray(powers, jnp.float32)[distance, symbol]
            return jnp.where(there[..., None], powers, jnp.asarray(without, jnp.float32))

        powers = self.chain.powers
        before = factor(left, left >= 0, powers, self.chain.stationary)
        after = factor(right, right < far, powers.swapaxes(1, 2), 1.0)
        posterior = before * after
        posterior /= jnp.sum(posterior, axis=-1, keepdims=True)
        return Forward(jnp.log(jnp.maximum(posterior, 1e-30)), inputs, {})

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The log posterior; never the mask."""
        del params
        return jnp.concatenate([hidden, jnp.full_like(hidden[..., :1], NEVER)], axis=-1)

    def init_cache(self, keys: Array, size: int) -> Int[Array, "B S"]:
        """An empty cache."""
        return jnp.zeros((len(keys), size), jnp.int32)

    def write(self, cache: Array, kv: Int[Array, "B W"], at: Int[Array, "B"]) -> Int[Array, "B S"]:
        """The cache with a window's tokens at positions `at + i`."""
        return jax.vmap(lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(cache, kv, at, 0)

    def pick(self, kv: Array, start: Int[Array, "B"], width: int) -> Int[Array, "B W"]:
        """Slots `start .. start + width - 1` of each row's window."""
        return window(kv, start, width)

    def take(self, kv: Array, slots: Int[Array, "B _"]) -> Int[Array, "B _"]:
        """Some slots of each row's window, zeros for one that is not in it."""
        return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(kv, slots)

    def widen(self, kv: Array, width: int) -> Int[Array, "B W"]:
        """The window with empty slots after it."""
        return pad_slots(kv, width)
