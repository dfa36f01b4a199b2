"""The transformer of causal models (Qwen2, Qwen3, Llama) and of block diffusion (SDAR).

::

    x = embedding[tokens]
    x <- x + Attention(norm(x))     N blocks
    x <- x + MLP(norm(x))
    logits = norm(x) head

What a position sees is the caller's affair: a mask of the window or a rule, and a mask of what is cached before it.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import TransformerConfig
from paradec_jax.models.base import shapes_of
from paradec_jax.nn.blocks import BlockConfig, PrefixMask, PreNormBlock, parameter, truncated_normal
from paradec_jax.nn.cache import KV, Layers
from paradec_jax.nn.norms import rms_norm
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.rope import Rotation, rotation
from paradec_jax.nn.scan import of_layers, scanned, stacked_cache
from paradec_jax.nn.visibility import CAUSAL, Seen

Inputs = Int[Array, "B W"] | Float[Array, "B W D"]  # tokens, or a vector in the place of each


class Transformer(nn.Module):
    """Names the parameters.

    Parameters: `embedding` [V, D], `layer_i` (pre-norm blocks), `final_norm` [D], and `head` [D, V] where the
    output matrix is not the embedding.

    Attributes:
      config: the shape.
      prepared: whether parameters come from `models.prepare`: a laid-out head is used where it is there, and no
        loop over layers stacks their caches.
    """

    config: TransformerConfig
    prepared: bool = False

    def setup(self) -> None:
        c = self.config
        self.block = rematerialised(PreNormBlock, c.remat)
        # A tied embedding must be small, or the first logits are large; one of its own starts at the scale of a
        # normalised stream, so that what the blocks add does not drown it.
        of_embedding = truncated_normal(c.init_std if c.tie_embeddings else 1.0)
        self.embedding = parameter(self, "embedding", of_embedding, (c.vocab_size, c.width), c.param_dtype)
        self.layer = [self.block(block_config(c)) for _ in range(c.layers)]
        self.final_norm = parameter(self, "final_norm", nn.initializers.ones, (c.width,), c.param_dtype)
        self.has_head = not c.tie_embeddings or (self.prepared and self.has_variable("params", "head"))
        if self.has_head:
            init = truncated_normal(c.init_std)
            self.head = parameter(self, "head", init, (c.width, c.vocab_size), c.param_dtype)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One causal pass without a cache; touches every parameter, for `init` alone."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = self.hidden(tokens, positions, CAUSAL, None, None)
        return self.logits(hidden)

    def hidden(
        self,
        tokens: Inputs,
        positions: Int[Array, "B W"],
        seen: Seen,
        cache: Layers | None,
        prefix_mask: PrefixMask | None,
    ) -> tuple[Float[Array, "B W D"], Layers]:
        """Head input of each position of a window, and the window's keys and values."""
        c = self.config
        vectors = self.embedding[tokens] if tokens.ndim == 2 else tokens
        x = vectors.astype(jnp.dtype(c.dtype))
        angles = rotation(positions, c.head_dim, c.rope_base)
        # A decoding loop would copy its caches to stack them in every step; whoever has one prepares parameters.
        if c.scan_layers and not self.is_initializing() and (cache is None or not self.prepared):
            x, kept = self._scanned(x, angles, seen, cache, prefix_mask)
            return rms_norm(x, self.final_norm, c.norm_eps), kept
        own = []
        for i, layer in enumerate(self.layer):
            x, kv = layer(x, angles, seen, cache[i] if cache else None, prefix_mask)
            own.append(kv)
        return rms_norm(x, self.final_norm, c.norm_eps), tuple(own)

    def _scanned(
        self,
        x: Float[Array, "B W D"],
        angles: Rotation,
        seen: Seen,
        cache: Layers | None,
        prefix_mask: PrefixMask | None,
    ) -> tuple[Float[Array, "B W D"], Layers]:
        """The stream after all blocks, and the window's keys and values, by a loop."""
        c, params = self.config, self.variables["params"]
        block = self.block(block_config(c), parent=None)

        def body(x: Array, params: Any, prefix: KV | None) -> Any:
            return block.apply({"params": params}, x, angles, seen, prefix, prefix_mask)

        layers = [params[f"layer_{i}"] for i in range(c.layers)]
        x, kept = scanned(body, x, layers, c.dtype, stacked_cache(cache))
        return x, of_layers(kept, c.layers)

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores, factors in the model's dtype, sums and scores in at least float32."""
        return dense(hidden, self.head if self.has_head else self.embedding.T, wide=True)


def block_config(config: TransformerConfig) -> BlockConfig:
    """The shape of every block."""
    c = config
    return BlockConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        feed_forward=c.feed_forward,
        norm_eps=c.norm_eps,
        rotation="halves",
        std=c.init_std,
        std_out=c.init_std / (2 * c.layers) ** 0.5,
        biases="qkv" if c.qkv_bias else "",
        qk_norm=c.qk_norm,
        attention=c.attention,
        param_dtype=c.param_dtype,
    )


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    return shapes_of(Transformer, config, {"layer": "layers"})


def init_params(config: TransformerConfig, key: Array) -> dict[str, Any]:
    """Random parameters: std sqrt(2 / 5D) (an untied embedding 1), branch outputs over sqrt(2 N), biases zero."""
    return jax.jit(Transformer(config).init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
