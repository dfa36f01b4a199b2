"""Denoisers that know the law of the texts: the exact posterior of each masked position, given what is revealed."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from stubs import base as stubs
from stubs.base import TokenKV

MASK_LOGIT = 3.0  # the posterior says nothing of the mask; whoever leaves it in draws it


@dataclasses.dataclass(frozen=True)
class JointDenoiser:
    """The posterior of a small joint law, computed over all its texts.

    ::

        p(x_p = v | revealed) = sum of p(x) over the texts x with x_p = v and x = canvas where it is revealed and seen

    Attributes:
      symbols: V - 1 tokens; the mask is token `symbols`.
      length: positions of a text; a shorter canvas is its beginning.
      weights: of every text, the last position counting fastest; they need not sum to 1.
      max_length: longest canvas.
    """

    symbols: int
    length: int
    weights: tuple[float, ...]
    max_length: int = 64
    counters: tuple[str, ...] = ()
    visibility: str = "full"
    block: int | None = None

    @property
    def vocab_size(self) -> int:
        """V, the mask included."""
        return self.symbols + 1

    @property
    def mask(self) -> int:
        """The mask's id."""
        return self.symbols

    @property
    def texts(self) -> Int[np.ndarray, "M L"]:
        """All texts."""
        return np.asarray(list(itertools.product(range(self.symbols), repeat=self.length)), np.int32)

    @property
    def law(self) -> Float[np.ndarray, "M"]:
        """The probability of each."""
        weights = np.asarray(self.weights, np.float64)
        return weights / weights.sum()

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head inputs are the logarithms of the posteriors."""
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

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The posterior's logarithm, and a number at the mask that no draw may read."""
        return _with_mask(hidden)


@dataclasses.dataclass(frozen=True)
class JointBlocks:
    """The posterior of a small joint law as a network with a cache that sees in blocks can know it.

    ::

        p(x_p = v | seen) = sum of p(x) over the texts x with x_p = v that hold every token that the query sees

    A query sees its block and the blocks before it, through the cache or the window. What it should not see, or does
    not see, is taken into account just so: a decoder with a wrong cache writes texts of another law.

    Attributes:
      symbols: V - 1 tokens; the mask is token `symbols`.
      length: positions of a text, whole blocks.
      weights: of every text, the last position counting fastest; they need not sum to 1.
      block: tokens of a block.
      alignment: "own", or "next" for scores at p that are those of p + 1.
      max_length: longest canvas.
    """

    symbols: int
    length: int
    weights: tuple[float, ...]
    block: int
    alignment: str = "own"
    max_length: int = 64
    counters: tuple[str, ...] = ()
    visibility: str = "block"

    @property
    def vocab_size(self) -> int:
        """V, the mask included."""
        return self.symbols + 1

    @property
    def mask(self) -> int:
        """The mask's id."""
        return self.symbols

    @property
    def texts(self) -> Int[np.ndarray, "M L"]:
        """All texts."""
        return np.asarray(list(itertools.product(range(self.symbols), repeat=self.length)), np.int32)

    @property
    def law(self) -> Float[np.ndarray, "M"]:
        """The probability of each."""
        weights = np.asarray(self.weights, np.float64)
        return weights / weights.sum()

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def init_cache(self, keys: Array, size: int) -> TokenKV:
        """An empty cache."""
        return stubs.empty(len(keys), size)

    def write(self, cache: TokenKV, window: TokenKV, at: Int[Array, "B"]) -> TokenKV:
        """The cache with a window stored at slots `at .. at + W - 1`."""
        return stubs.write(cache, window, at)

    def pick(self, window: TokenKV, start: Int[Array, "B"], width: int) -> TokenKV:
        """Slots `start .. start + width - 1` of each row's window."""
        return stubs.pick(window, start, width)

    def widen(self, window: TokenKV, width: int) -> TokenKV:
        """The window with zeros after its slots, up to `width`."""
        return stubs.widen(window, width)

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head inputs are the logarithms of the posteriors. The caller stores the window."""
        if mask is None:
            mask = positions[:, :, None] // self.block >= positions[:, None] // self.block
        own = TokenKV(inputs, positions)
        keys, seen = stubs.keys_seen(own, prefix, mask)
        shown = (seen & (keys.tokens != self.mask)[:, None]).astype(jnp.int32)
        place = jax.nn.one_hot(keys.positions, self.length, dtype=jnp.int32)
        known = jnp.einsum("bwk,bkl->bwl", shown, place * (keys.tokens[..., None] + 1)) - 1  # -1: not known
        texts, law = jnp.asarray(self.texts), jnp.asarray(self.law, jnp.float32)
        agrees = jnp.all((texts == known[:, :, None]) | (known < 0)[:, :, None], axis=-1)
        at = jnp.minimum(positions + (self.alignment == "next"), self.length - 1)
        there = texts.T[at][..., None] == jnp.arange(self.symbols)
        posterior = jnp.einsum("bwm,bwmv->bwv", agrees * law, there.astype(jnp.float32))
        return Forward(jnp.log(jnp.maximum(posterior, 1e-30)), own, {})

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The posterior's logarithm, and a number at the mask that no draw may read."""
        return _with_mask(hidden)


PLUS, EQUALS = 10, 11


@dataclasses.dataclass(frozen=True)
class SumDenoiser:
    """The posterior of `dd+dd=ddd`: two numbers from 00 to 99, all pairs alike, and their sum.

    ::

        position   0 1 2 3 4 5 6 7 8
        text       a b + c d = s t u        columns (b, d, u), (a, c, t) and s, tied by their carries

    Digits are tokens 0 to 9, `+` is 10, `=` is 11 and the mask 12.

    Attributes:
      max_length: longest canvas.
    """

    max_length: int = 9
    counters: tuple[str, ...] = ()
    visibility: str = "full"
    block: int | None = None

    @property
    def vocab_size(self) -> int:
        """V, the mask included."""
        return 13

    @property
    def mask(self) -> int:
        """The mask's id."""
        return 12

    def valid(self, texts: Int[np.ndarray, "N 9"]) -> Bool[np.ndarray, "N"]:
        """Which texts are sums."""
        a, b, plus, c, d, equals, s, t, u = np.asarray(texts).T
        digits = np.stack([a, b, c, d, s, t, u])
        form = (plus == PLUS) & (equals == EQUALS) & (digits < 10).all(axis=0)
        return form & (10 * (a + c) + b + d == 100 * s + 10 * t + u)

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B 9"],
        positions: Int[Array, "B 9"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B 9 9"] | None = None,
    ) -> Forward:
        """One call; head inputs are the logarithms of the posteriors. A canvas is a whole text."""
        del prefix, positions, mask
        seen = inputs[..., None] == jnp.arange(10)
        evidence = jnp.where((inputs == self.mask)[..., None], 1.0, seen.astype(jnp.float32))
        a, b, c, d, s, t, u = (evidence[:, i] for i in (0, 1, 3, 4, 6, 7, 8))
        ones, tens = jnp.asarray(_column()[0]), jnp.asarray(_column())
        up = jnp.einsum("xyzo,nx,ny,nz->no", ones, b, d, u)  # weight of each carry into the tens, from below
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

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The posterior's logarithm, and a number at the mask that no draw may read."""
        return _with_mask(hidden)


def _with_mask(hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
    at_mask = jnp.max(hidden, axis=-1, keepdims=True) + MASK_LOGIT
    return jnp.concatenate([hidden, at_mask], axis=-1)


@functools.cache
def _column() -> Float[np.ndarray, "2 10 10 10 2"]:
    """1 where a carry in and two digits make a digit and a carry out."""
    table = np.zeros((2, 10, 10, 10, 2), np.float32)
    for carry, x, y in np.ndindex(2, 10, 10):
        table[carry, x, y, (carry + x + y) % 10, (carry + x + y) // 10] = 1
    return table
