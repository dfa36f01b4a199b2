"""A denoiser of masked canvases with known answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix
from stubs.base import CachedStub, Ids, Inputs, Mask, Probe, TokenKV, keys_seen, said


@dataclasses.dataclass(frozen=True)
class StubDenoiser(CachedStub):
    """A bidirectional network that fills masks by a known law, whatever the order in which they are
    revealed.

    ::

        x(p) = (x(q) + a (p - q)) mod (V - 1)      q: the nearest revealed position before p, else the one after it
               (a p + b) mod (V - 1)               where nothing is revealed

        canvas   3 _ _ 4 _        a = 2
        filled   3 5 7 4 6

    The logit of x(p) is `sharpness / (1 + |p - q|)` (q = -1 where nothing is revealed), all others
    are 0, so that positions beside a revealed one are surest. Where a query does not see each
    position of its canvas once, through the cache or the window, another token is predicted (x +
    1): a canvas holds 0 .. n - 1, or in blocks 0 up to the end of the query's block.

    Attributes:
      vocab_size: V; token V - 1 is the mask.
      max_length: longest canvas.
      slope, constant: a and b.
      sharpness: see above.
      alignment: "own", or "next" for scores at p that are those of p + 1.
      block: tokens of a block that sees the blocks before it and itself; None where all see all.
      others: further lengths of blocks that it serves.
      origin: where blocks count from, "start", or "prompt" for the prompt's end.
      probe: called on the host with "network_calls" whenever a call really runs.
    """

    vocab_size: int = 11
    max_length: int = 64
    slope: int = 2
    constant: int = 1
    sharpness: float = 8.0
    alignment: str = "own"
    block: int | None = None
    others: tuple[int, ...] = ()
    origin: str = "start"
    probe: Probe | None = None

    @property
    def mask(self) -> int:
        return self.vocab_size - 1

    @property
    def blocks(self) -> tuple[int, ...]:
        return () if self.block is None else tuple(sorted({self.block, *self.others}))

    @property
    def visibility(self) -> str:
        """A position sees the whole canvas, or its block and those before it."""
        return "full" if self.block is None else "block"

    def expected(self, canvas: Sequence[int | None]) -> list[int]:
        """A canvas as it ends; None marks a position to be filled."""
        given = {p: token for p, token in enumerate(canvas) if token is not None}

        def token(p: int) -> int:
            before, after = [q for q in given if q <= p], [q for q in given if q > p]
            if not given:
                return (self.slope * p + self.constant) % self.mask
            q = before[-1] if before else after[0]
            return (given[q] + self.slope * (p - q)) % self.mask

        return [token(p) for p in range(len(canvas))]

    def embedding(self, params: Any) -> Float[Array, "V V"]:
        """The vector of each token: a one at its id."""
        return jnp.eye(self.vocab_size)

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        """One call; head input is the predicted token, as a number, and its logit. The caller
        stores the window.

        Of a vector in the place of a token, the token with the largest share is read.
        """
        self.report("network_calls")
        inputs = inputs if inputs.ndim == 2 else jnp.argmax(inputs, axis=-1).astype(jnp.int32)
        if mask is None:
            block = self.block or self.max_length
            mask = positions[:, :, None] // block >= positions[:, None] // block
        own = TokenKV(inputs, positions)
        keys, seen = keys_seen(own, prefix, mask)
        at = positions + (self.alignment == "next")
        predicted, distance = self._filled(at, keys, seen)
        predicted = (predicted + self._astray(positions, keys, seen)) % self.mask
        hidden = jnp.stack([predicted, self.sharpness / (1 + distance)], axis=-1).astype(
            jnp.float32
        )
        return Forward(hidden, own, {})

    def logits(self, params: Any, hidden: Float[Array, "*shape 2"]) -> Float[Array, "*shape V"]:
        """The logit of the predicted token, 0 elsewhere."""
        return said(params, hidden[..., 1:] * self.one_hot(hidden))

    def _filled(
        self, at: Array, keys: TokenKV, seen: Array
    ) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
        """x(p) and |p - q| of the positions `at`."""
        shown = seen & (keys.tokens != self.mask)[:, None]
        ahead = keys.positions[:, None] - at[:, :, None]
        far = self.max_length
        rank = jnp.where(shown, jnp.where(ahead <= 0, -ahead, far + ahead), 3 * far)
        nearest = jnp.argmin(rank, axis=-1)
        q = jnp.take_along_axis(
            jnp.broadcast_to(keys.positions[:, None], rank.shape), nearest[..., None], -1
        )
        x = jnp.take_along_axis(
            jnp.broadcast_to(keys.tokens[:, None], rank.shape), nearest[..., None], -1
        )
        some = jnp.any(shown, axis=-1)
        q, x = (
            jnp.where(some, q[..., 0], -1),
            jnp.where(some, x[..., 0], self.constant - self.slope),
        )
        return (x + self.slope * (at - q)) % self.mask, jnp.abs(at - q)

    def _astray(self, positions: Array, keys: TokenKV, seen: Array) -> Bool[Array, "B W"]:
        """Queries that do not see each position of their canvas once."""
        count = jnp.sum(seen, axis=-1)
        where = jnp.where(seen, keys.positions[:, None], 0)
        times = jnp.sum(
            jax.nn.one_hot(
                jnp.where(seen, keys.positions[:, None], -1), self.max_length, dtype=jnp.int32
            ),
            axis=-2,
        )
        whole = (
            jnp.all(times <= 1, axis=-1)
            & (jnp.max(where, axis=-1) == count - 1)
            & (count > positions)
        )
        if self.block is not None:
            most = max(self.blocks)
            start = positions if self.origin == "prompt" else positions // most * most
            whole &= count <= start + most
        return ~whole
