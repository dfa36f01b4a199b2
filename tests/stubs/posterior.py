"""Denoisers that know the law of the texts: the exact posterior of each masked position, given what
is revealed.
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

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


PLUS, EQUALS = 10, 11


@dataclasses.dataclass(frozen=True)
class SumDenoiser(Posterior):
    """The posterior of `dd+dd=ddd`: two numbers from 00 to 99, all pairs alike, and their sum.

    ::

        position   0 1 2 3 4 5 6 7 8
        text       a b + c d = s t u        columns (b, d, u), (a, c, t) and s, tied by their carries

    Digits are tokens 0 to 9, `+` is 10, `=` is 11 and the mask 12.

    Attributes:
      max_length: longest canvas.
    """

    max_length: int = 9
    vocab_size: ClassVar[int] = 13
    mask: ClassVar[int] = 12

    def valid(self, texts: Int[np.ndarray, "N 9"]) -> Bool[np.ndarray, "N"]:
        """Which texts are sums."""
        a, b, plus, c, d, equals, s, t, u = np.asarray(texts).T
        digits = np.stack([a, b, c, d, s, t, u])
        form = (plus == PLUS) & (equals == EQUALS) & (digits < 10).all(axis=0)
        return form & (10 * (a + c) + b + d == 100 * s + 10 * t + u)

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        del prefix, positions, mask
        seen = inputs[..., None] == jnp.arange(10)
        evidence = jnp.where((inputs == self.mask)[..., None], 1.0, seen.astype(jnp.float32))
        a, b, c, d, s, t, u = (evidence[:, i] for i in (0, 1, 3, 4, 6, 7, 8))
        ones, tens = jnp.asarray(_column()[0]), jnp.asarray(_column())
        # weight of each carry into the tens, from below
        up = jnp.einsum("xyzo,nx,ny,nz->no", ones, b, d, u)
        down = jnp.einsum("ixyzo,nx,ny,nz,no->ni", tens, a, c, t, s[:, :2])  # and from above
        posterior = {
            1: jnp.einsum("xyzo,ny,nz,no->nx", ones, d, u, down),
            4: jnp.einsum("xyzo,nx,nz,no->ny", ones, b, u, down),
            8: jnp.einsum("xyzo,nx,ny,no->nz", ones, b, d, down),
            0: jnp.einsum("ixyzo,ni,ny,nz,no->nx", tens, up, c, t, s[:, :2]),
            3: jnp.einsum("ixyzo,ni,nx,nz,no->ny", tens, up, a, t, s[:, :2]),
            7: jnp.einsum("ixyzo,ni,nx,ny,no->nz", tens, up, a, c, s[:, :2]),
            6: jnp.pad(jnp.einsum("ixyzo,ni,nx,ny,nz->no", tens, up, a, c, t), ((0, 0), (0, 8))),
        }
        signs = {2: PLUS, 5: EQUALS}
        columns = [
            jnp.broadcast_to(jnp.arange(12) == signs[p], (len(inputs), 12)).astype(jnp.float32)
            if p in signs
            else jnp.pad(posterior[p], ((0, 0), (0, 2)))
            for p in range(9)
        ]
        return Forward(jnp.log(jnp.maximum(jnp.stack(columns, axis=1), 1e-30)), None, {})


@functools.cache
def _column() -> Float[np.ndarray, "2 10 10 10 2"]:
    """1 where a carry in and two digits make a digit and a carry out."""
    table = np.zeros((2, 10, 10, 10, 2), np.float32)
    for carry, x, y in np.ndindex(2, 10, 10):
        table[carry, x, y, (carry + x + y) % 10, (carry + x + y) // 10] = 1
    return table
