"""A denoiser of masked canvases with known answers, and a tiny real one."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import MASKED_DIFFUSION_PRESETS
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models import denoiser
from paradec_jax.models.denoiser_network import DenoiserNetwork
from paradec_jax.testing import stubs
from paradec_jax.testing.stubs import TokenKV


@dataclasses.dataclass(frozen=True)
class StubDenoiser:
    """A bidirectional network that fills masks by a known law, whatever the order in which they are revealed.

    ::

        x(p) = (x(q) + a (p - q)) mod (V - 1)      q: the nearest revealed position before p, else the one after it
               (a p + b) mod (V - 1)               where nothing is revealed

        canvas   3 _ _ 4 _        a = 2
        filled   3 5 7 4 6

    The logit of x(p) is `sharpness / (1 + |p - q|)` (q = -1 where nothing is revealed), all others are 0, so that
    positions beside a revealed one are surest. Where a query does not see each position of its canvas once, through
    the cache or the window, another token is predicted (x + 1): a canvas holds 0 .. n - 1, or in blocks 0 up to the
    end of the query's block.

    Attributes:
      vocab_size: V; token V - 1 is the mask.
      max_length: longest canvas.
      slope, constant: a and b.
      sharpness: see above.
      alignment: "own", or "next" for scores at p that are those of p + 1.
      block: tokens of a block that sees the blocks before it and itself; None where all see all.
      others: further lengths of blocks that it serves.
      counters: no counter of its own.
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
    counters: tuple[str, ...] = ()
    probe: stubs.Probe | None = None

    @property
    def mask(self) -> int:
        """The mask's id."""
        return self.vocab_size - 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """Lengths of blocks that it serves."""
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

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def embedding(self, params: Any) -> Float[Array, "V V"]:
        """The vector of each token: a one at its id."""
        return jnp.eye(self.vocab_size)

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
        inputs: Int[Array, "B W"] | Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head input is the predicted token, as a number, and its logit. The caller stores the window.

        Of a vector in the place of a token, the token with the largest share is read.
        """
        stubs.report(self.probe, "network_calls")
        inputs = inputs if inputs.ndim == 2 else jnp.argmax(inputs, axis=-1).astype(jnp.int32)
        if mask is None:
            block = self.block or self.max_length
            mask = positions[:, :, None] // block >= positions[:, None] // block
        own = TokenKV(inputs, positions)
        keys, seen = stubs.keys_seen(own, prefix, mask)
        at = positions + (self.alignment == "next")
        predicted, distance = self._filled(at, keys, seen)
        predicted = (predicted + self._astray(positions, keys, seen)) % self.mask
        hidden = jnp.stack([predicted, self.sharpness / (1 + distance)], axis=-1).astype(jnp.float32)
        return Forward(hidden, own, dict.fromkeys(self.counters, 1))

    def logits(self, params: Any, hidden: Float[Array, "*shape 2"]) -> Float[Array, "*shape V"]:
        """The logit of the predicted token, 0 elsewhere."""
        return stubs.said(params, stubs.one_hot_logits(hidden[..., 0], self.vocab_size, hidden[..., 1:]))

    def _filled(self, at: Array, keys: TokenKV, seen: Array) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
        """x(p) and |p - q| of the positions `at`."""
        shown = seen & (keys.tokens != self.mask)[:, None]
        ahead = keys.positions[:, None] - at[:, :, None]
        far = self.max_length
        rank = jnp.where(shown, jnp.where(ahead <= 0, -ahead, far + ahead), 3 * far)
        nearest = jnp.argmin(rank, axis=-1)
        q = jnp.take_along_axis(jnp.broadcast_to(keys.positions[:, None], rank.shape), nearest[..., None], -1)
        x = jnp.take_along_axis(jnp.broadcast_to(keys.tokens[:, None], rank.shape), nearest[..., None], -1)
        some = jnp.any(shown, axis=-1)
        q, x = jnp.where(some, q[..., 0], -1), jnp.where(some, x[..., 0], self.constant - self.slope)
        return (x + self.slope * (at - q)) % self.mask, jnp.abs(at - q)

    def _astray(self, positions: Array, keys: TokenKV, seen: Array) -> Bool[Array, "B W"]:
        """Queries that do not see each position of their canvas once."""
        count = jnp.sum(seen, axis=-1)
        where = jnp.where(seen, keys.positions[:, None], 0)
        times = jnp.sum(
            jax.nn.one_hot(jnp.where(seen, keys.positions[:, None], -1), self.max_length, dtype=jnp.int32),
            axis=-2,
        )
        whole = jnp.all(times <= 1, axis=-1) & (jnp.max(where, axis=-1) == count - 1) & (count > positions)
        if self.block is not None:
            whole &= count <= (positions // max(self.blocks) + 1) * max(self.blocks)
        return ~whole


def tiny_denoiser(**changes: Any) -> DenoiserNetwork:
    """A denoiser of a few thousand parameters; `changes` are fields of its config."""
    return DenoiserNetwork(dataclasses.replace(MASKED_DIFFUSION_PRESETS["test-mdlm"], **changes))


@functools.cache
def tiny_denoiser_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_denoiser`, those that training begins at zero among them, multiplied by `gain`."""
    rng, config = np.random.default_rng(seed), tiny_denoiser(**changes).config
    with jax.ensure_compile_time_eval():  # the first caller may be under a trace, the next one is not
        return jax.tree.map(
            lambda leaf: jnp.asarray(gain * (0.2 * rng.normal(size=leaf.shape) + 0.05), leaf.dtype),
            denoiser.parameter_shapes(config),
        )
