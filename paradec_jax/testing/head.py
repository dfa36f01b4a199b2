"""A residual head with known answers, for the denoiser that sees in blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.testing import stubs
from paradec_jax.testing.denoiser import StubDenoiser
from paradec_jax.testing.stubs import TokenKV

KINDS = ("right", "liar", "random")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadKV(TokenKV):
    """Tokens and their positions, and which head inputs were not those of the complete block."""

    stale: Bool[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class StubHead:
    """A head that knows what its backbone would say of the tokens that it reads, and returns what is missing.

    ::

        right     a + r = backbone(y)
        liar      a + r predicts another token than the backbone, everywhere
        random    a + r predicts another token at about half of the positions

    Its knowledge of earlier blocks is that of its cache. Where that lacks one, or holds head inputs that are not the
    backbone's of the complete block, a right head lies too.

    Attributes:
      of: the backbone.
      kind: "right", "liar" or "random".
      probe: called on the host with "head_calls" whenever a call really runs.
    """

    of: StubDenoiser
    kind: str = "right"
    probe: stubs.Probe | None = None
    counters: tuple[str, ...] = ("head_calls",)
    vocab_size: int = 0

    @property
    def max_length(self) -> int:
        """That of the backbone."""
        return self.of.max_length

    @property
    def visibility(self) -> str:
        """A position sees its block and the ones before it."""
        return "block"

    @property
    def block(self) -> int | None:
        """That of the backbone."""
        return self.of.block

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def init_cache(self, keys: Array, size: int) -> HeadKV:
        """An empty cache."""
        return HeadKV(**vars(stubs.empty(len(keys), size)), stale=jnp.ones((len(keys), size), bool))

    def write(self, cache: HeadKV, window: HeadKV, at: Int[Array, "B"]) -> HeadKV:
        """The cache with a window stored at slots `at .. at + W - 1`."""
        return stubs.write(cache, window, at)

    def pick(self, window: HeadKV, start: Int[Array, "B"], width: int) -> HeadKV:
        """Slots `start .. start + width - 1` of each row's window."""
        return stubs.pick(window, start, width)

    def widen(self, window: HeadKV, width: int) -> HeadKV:
        """The window with zeros after its slots, up to `width`."""
        return stubs.widen(window, width)

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Refuses: the output matrix is the backbone's. Raises TypeError."""
        raise TypeError("a residual head has no output matrix")

    def forward(
        self,
        params: Any,
        vectors: Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
        *,
        hidden: Float[Array, "B W 2"],
    ) -> Forward:
        """The residual of a window. The caller stores keys and values."""
        stubs.report(self.probe, "head_calls")
        tokens = jnp.argmax(vectors, axis=-1).astype(jnp.int32)
        quiet, past = dataclasses.replace(self.of, probe=None), prefix
        stale = jnp.zeros(len(tokens), bool)
        if prefix is not None and prefix.visible is not None:
            past = Prefix(TokenKV(prefix.kv.tokens, prefix.kv.positions), prefix.visible)
            seen = jnp.arange(prefix.kv.stale.shape[1]) < prefix.visible[:, None]
            stale = jnp.any(prefix.kv.stale & seen, axis=1)
        truth = quiet.forward(None, tokens, positions, past, mask).hidden
        wrong = jnp.broadcast_to(stale[:, None], tokens.shape)
        if self.kind == "liar":
            wrong |= True
        if self.kind == "random":
            wrong |= (5 * tokens + 3 * positions + truth[..., 0].astype(jnp.int32)) % 7 < 3
        predicted = (truth[..., 0] + wrong) % self.of.mask
        said = jnp.stack([predicted, truth[..., 1]], axis=-1)
        kv = HeadKV(tokens, positions, jnp.any(jnp.abs(hidden - truth) > 1e-4, axis=-1))
        return Forward(stubs.said(params, said - hidden), kv, {"head_calls": 1})
