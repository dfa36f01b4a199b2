"""Denoisers that know the law of the texts: the exact posterior of each masked position, given what
is revealed.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix
from stubs.base import CachedStub, Ids, Inputs, Mask, Stub, TokenKV, keys_seen

MASK_LOGIT = 3.0  # the posterior says nothing of the mask; whoever leaves it in draws it


class Posterior(Stub):
    """Its head inputs are the logarithms of the posteriors."""

    visibility: ClassVar[str] = "full"

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The posterior's logarithm, and a number at the mask that no draw may read."""
        at_mask = jnp.max(hidden, axis=-1, keepdims=True) + MASK_LOGIT
        return jnp.concatenate([hidden, at_mask], axis=-1)


@dataclasses.dataclass(frozen=True)
class Joint(Posterior):
    """A small joint law of whole texts.

    Attributes:
      symbols: V - 1 tokens; the mask is token `symbols`.
      length: positions of a text.
      weights: of every text, the last position counting fastest; they need not sum to 1.
    """

    symbols: int
    length: int
    weights: tuple[float, ...]

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def mask(self) -> int:
        return self.symbols

    @property
    def texts(self) -> Int[np.ndarray, "M L"]:
        return np.asarray(
            list(itertools.product(range(self.symbols), repeat=self.length)), np.int32
        )

    @property
    def law(self) -> Float[np.ndarray, "M"]:
        """The probability of each."""
        weights = np.asarray(self.weights, np.float64)
        return weights / weights.sum()


@dataclasses.dataclass(frozen=True)
class JointDenoiser(Joint):
    """The posterior of a small joint law, computed over all its texts.

    ::

        p(x_p = v | revealed) = sum of p(x) over the texts x with x_p = v and x = canvas where it is revealed and seen

    A canvas shorter than a text is its beginning.

    Attributes:
      max_length: longest canvas.
    """

    max_length: int = 64

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        del prefix, positions
        batch, width = inputs.shape
        seen = jnp.ones((batch, width), bool)
        if mask is not None:
            seen = jnp.broadcast_to(mask, (batch, width, width))[:, 0]
        inputs, shown = inputs[:, : self.length], (seen & (inputs != self.mask))[:, : self.length]
        texts, law = jnp.asarray(self.texts[:, :width]), jnp.asarray(self.law, jnp.float32)
        agrees = jnp.all((texts == inputs[:, None]) | ~shown[:, None], axis=-1)
        own = (texts[..., None] == jnp.arange(self.symbols)).astype(jnp.float32)
        posterior = jnp.einsum("bm,mwv->bwv", agrees * law, own)
        hidden = jnp.log(jnp.maximum(posterior, 1e-30))
        hidden = jnp.pad(hidden, ((0, 0), (0, max(width - self.length, 0)), (0, 0)))
        return Forward(hidden, None, {})


@dataclasses.dataclass(frozen=True)
class JointBlocks(Joint, CachedStub):
    """The posterior of a small joint law as a network with a cache that sees in blocks can know it.

    ::

        p(x_p = v | seen) = sum of p(x) over the texts x with x_p = v that hold every token that the query sees

    A query sees its block and the blocks before it, through the cache or the window. What it should
    not see, or does not see, is taken into account just so: a decoder with a wrong cache writes
    texts of another law.

    Attributes:
      block: tokens of a block; a text has whole ones.
      alignment: "own", or "next" for scores at p that are those of p + 1.
      max_length: longest canvas.
    """

    block: int = dataclasses.field()  # the base's None is no default
    alignment: str = "own"
    max_length: int = 64
    visibility: ClassVar[str] = "block"

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        if mask is None:
            mask = positions[:, :, None] // self.block >= positions[:, None] // self.block
        own = TokenKV(inputs, positions)
        keys, seen = keys_seen(own, prefix, mask)
        shown = (seen & (keys.tokens != self.mask)[:, None]).astype(jnp.int32)
        place = jax.nn.one_hot(keys.positions, self.length, dtype=jnp.int32)
        # -1: not known
        known = jnp.einsum("bwk,bkl->bwl", shown, place * (keys.tokens[..., None] + 1)) - 1
        texts, law = jnp.asarray(self.texts), jnp.asarray(self.law, jnp.float32)
        agrees = jnp.all((texts == known[:, :, None]) | (known < 0)[:, :, None], axis=-1)
        at = jnp.minimum(positions + (self.alignment == "next"), self.length - 1)
        there = texts.T[at][..., None] == jnp.arange(self.symbols)
        posterior = jnp.einsum("bwm,bwmv->bwv", agrees * law, there.astype(jnp.float32))
        return Forward(jnp.log(jnp.maximum(posterior, 1e-30)), own, {})
