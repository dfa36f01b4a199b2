"""A law that is known exactly, a Markov chain over a few symbols, and the denoiser that knows it:
the perfect one.

What is hidden depends on what is shown through its nearest neighbours alone, so that
forward-backward comes down to two powers of the transitions T::

    p(x_i = v | shown)  ~  T^(i - l)[x_l, v] T^(r - i)[v, x_r]        l, r the nearest shown positions

Where none is before, pi[v] stands in the place of the first factor; where none is after, 1 in that
of the second. `experiments.tasks.chains` has the law itself.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float64, Int

from experiments.tasks.chains import MarkovLaw
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared

MASK_LOGIT = 3.0  # above all others; the posterior says nothing of the mask, which no draw may read


@dataclasses.dataclass(frozen=True)
class Chain(MarkovLaw):
    """A law in which every symbol may follow every other one.

    Attributes:
      weights: probabilities of the transitions out of a symbol, all of them above 0; each symbol
        has them in an order of its own.
      length: L, symbols of a text.
      seed: of those orders.
    """

    weights: tuple[float, ...] = (0.72, 0.13, 0.06, 0.03, 0.02, 0.02, 0.01, 0.01)
    length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            len(self.weights) < 2
            or min(self.weights) <= 0
            or not math.isclose(sum(self.weights), 1)
        ):
            raise ValueError(
                f"weights must be at least two numbers above 0 that sum to 1, not {self.weights}"
            )
        if self.length < 2:
            raise ValueError(f"length must be at least 2, not {self.length}")

    @property
    def symbols(self) -> int:
        """V, symbols; the mask is token V of a denoiser."""
        return len(self.weights)

    @functools.cached_property
    def transitions(self) -> Float64[np.ndarray, "V V"]:
        """T, by symbol and the next one."""
        rows = np.tile(np.asarray(self.weights, np.float64), (self.symbols, 1))
        return np.random.default_rng(self.seed).permuted(rows, axis=1)


@dataclasses.dataclass(frozen=True)
class ChainDenoiser:
    """The network that knows the law: exact posteriors, no parameters.

    A canvas may be a window from anywhere in a longer text, since the chain is stationary.

    Attributes:
      chain: the law.
    """

    chain: Chain
    counters: tuple[str, ...] = ()
    visibility: str = "full"
    subs: bool = True
    block: int | None = None

    @property
    def vocab_size(self) -> int:
        """V + 1, the mask included."""
        return self.chain.symbols + 1

    @property
    def max_length(self) -> int:
        """Longest canvas."""
        return self.chain.length

    @property
    def spec(self) -> TokenSpec:
        """The mask is the last token."""
        return TokenSpec(mask=self.chain.symbols, alignment="own")

    def prepare(self, params: Any) -> Prepared:
        """Nothing, marked as prepared."""
        return params if isinstance(params, Prepared) else Prepared(params)

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head inputs are the logarithms of the posteriors, which at shown positions are
        one-hot.
        """
        del params, prefix, positions
        (batch, width), symbols = inputs.shape, self.chain.symbols
        shown = inputs != symbols
        if mask is not None:
            shown &= jnp.broadcast_to(mask, (batch, width, width))[:, 0]
        at = jnp.arange(width)
        # nearest shown positions, one's own included
        left = lax.cummax(jnp.where(shown, at, -1), axis=1)
        right = lax.cummin(jnp.where(shown, at, width), axis=1, reverse=True)
        powers = jnp.asarray(self.chain.powers, jnp.float32)

        def symbol(place: Array) -> Array:
            found = jnp.take_along_axis(inputs, jnp.clip(place, 0, width - 1), axis=1)
            return jnp.minimum(found, symbols - 1)

        before = powers[jnp.where(left < 0, 0, at - left), symbol(left)]
        before = jnp.where(
            left[..., None] < 0, jnp.asarray(self.chain.stationary, jnp.float32), before
        )
        after = jnp.swapaxes(powers, 1, 2)[jnp.where(right >= width, 0, right - at), symbol(right)]
        posterior = before * jnp.where(right[..., None] >= width, 1.0, after)
        posterior /= jnp.sum(posterior, axis=-1, keepdims=True)
        return Forward(jnp.log(jnp.maximum(posterior, 1e-30)), None, {})

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The posterior's logarithm, and a number at the mask that no draw may read."""
        del params
        at_mask = jnp.max(hidden, axis=-1, keepdims=True) + MASK_LOGIT
        return jnp.concatenate([hidden, at_mask], axis=-1)
