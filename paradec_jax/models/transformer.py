"""The transformer of causal models (Qwen2, Qwen3, Llama), of block diffusion (SDAR) and of full
attention (LLaDA, Dream).

::

    x = embedding[tokens]
    x <- x + Attention(norm(x))     N blocks
    x <- x + MLP(norm(x))
    logits = norm(x) head

What a position sees is the network's affair, by its config: the positions before it, its block as
well, or all.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import MOST, TransformerConfig
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models.network import Inputs, KVNetwork
from paradec_jax.nn.blocks import PreNormBlock, parameter, truncated_normal
from paradec_jax.nn.cache import Layers
from paradec_jax.nn.ends import Ends
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.scan import in_turn, reading, scanned, traced_once
from paradec_jax.nn.visibility import Seen, Stream, View, whole_text
from paradec_jax.sharding import axes


class Transformer(Ends):
    """Names the parameters: `embedding` [V, D], `layer_i` (pre-norm blocks), `final_norm` [D], and
    `head` [D, V] where the output matrix is not the embedding.

    Where parameters are prepared, no loop over layers stacks their caches.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.block = rematerialised(PreNormBlock, c.remat)
        # A tied embedding must be small, or the first logits are large; one of its kv starts at the
        # scale of a normalised stream, so that what the blocks add does not drown it.
        init = truncated_normal(c.init_std if c.tie_embeddings else 1.0)
        self.embedding = parameter(self, "embedding", init, (c.vocab_size, c.width))
        self.layer = [self.block(c) for _ in range(c.layers)]
        self.end()

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """Logits of whole texts, in one pass without a cache."""
        return self.logits(self.hidden(tokens, whole_text(self.config, tokens.shape))[0])

    def hidden(self, tokens: Inputs, view: View) -> tuple[Stream, Layers]:
        """Normalised hidden states of a window, and the window's keys and values."""
        c, given = self.config, view.cache
        vectors = self.embedding[tokens] if tokens.ndim == 2 else tokens
        x = vectors.astype(jnp.dtype(c.dtype))
        # A decoding loop would copy its caches to stack them in every step; whoever has one
        # prepares parameters.
        scan = c.scan_layers and (given is None or not self.prepared)
        if view.positions is not None:
            # A loop has one program for all layers, so each of them needs a number.
            windows = [(window or MOST) if scan else window for window in c.windows]
            given = list(zip(given or [None] * c.layers, windows, strict=True))
        if self.is_initializing() or not (scan or self.prepared):
            x, kv = in_turn(reading(view), x, self.layer, given)
        else:
            layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]
            through = functools.partial(scanned, dtype=c.dtype) if scan else traced_once
            x, kv = through(reading(view), x, self.block(c, parent=None), layers, given=given)
        return self.normalise(x), kv


@dataclasses.dataclass(frozen=True)
class TransformerNetwork(KVNetwork):
    """The transformer as decoders and losses drive it, causal or block by block as its config says."""

    config: TransformerConfig
    linen = Transformer
    table = axes.TRANSFORMER

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for, in whole blocks of every length that it serves."""
        whole = math.lcm(*self.blocks)  # 1 of a causal model
        return self.config.max_length // whole * whole

    @property
    def blocks(self) -> tuple[int, ...]:
        """Lengths of blocks that the checkpoint serves; none of a causal model."""
        return () if self.block is None else getattr(self.config, "blocks", None) or (self.block,)

    @property
    def origin(self) -> str:
        """Where blocks of a decoded text count from, a fact of the checkpoint; "start" of a causal
        model.
        """
        return getattr(self.config, "origin", "start")

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
    ) -> Forward:
        """Reads a window. The caller stores the keys and values."""
        hidden, kv = self.apply(
            params, Transformer.hidden, inputs, self.view(positions, prefix, mask)
        )
        return Forward(hidden, kv, {})
