"""A residual head with known answers, for the denoiser that sees in blocks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.machine.network import Forward, Prefix
from stubs.base import CachedStub, Ids, Mask, Probe, TokenKV, said
from stubs.denoiser import StubDenoiser

KINDS = ("right", "liar", "random")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadKV(TokenKV):
    """Tokens and their positions, and which head inputs were not those of the complete block."""

    stale: Bool[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class StubHead(CachedStub):
    """A head that knows what its backbone would say of the tokens that it reads, and returns what
    is missing.

    ::

        right     a + r = backbone(y)
        liar      a + r predicts another token than the backbone, everywhere
        random    a + r predicts another token at about half of the positions

    Its knowledge of earlier blocks is that of its cache. Where that lacks one, or holds head inputs
    that are not the backbone's of the complete block, a right head lies too.

    Attributes:
      of: the backbone.
      kind: "right", "liar" or "random".
      probe: called on the host with "head_calls" whenever a call really runs.
    """

    of: StubDenoiser
    kind: str = "right"
    probe: Probe | None = None
    counters: ClassVar[tuple[str, ...]] = ("head_calls",)
    visibility: ClassVar[str] = "block"
    vocab_size: ClassVar[int] = 0

    @property
    def max_length(self) -> int:
        return self.of.max_length

    @property
    def block(self) -> int | None:
        return self.of.block

    def init_cache(self, keys: Array, size: int) -> HeadKV:
        return HeadKV(
            **vars(super().init_cache(keys, size)), stale=jnp.ones((len(keys), size), bool)
        )

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Refuses: the output matrix is the backbone's. Raises TypeError."""
        raise TypeError("a residual head has no output matrix")

    def forward(
        self,
        params: Any,
        vectors: Float[Array, "B W V"],
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
        *,
        hidden: Float[Array, "B W 2"],
    ) -> Forward:
        """The residual of a window. The caller stores keys and values."""
        self.report("head_calls")
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
        right = jnp.stack([predicted, truth[..., 1]], axis=-1)
        kv = HeadKV(tokens, positions, jnp.any(jnp.abs(hidden - truth) > 1e-4, axis=-1))
        return Forward(said(params, right - hidden), kv, {"head_calls": 1})
