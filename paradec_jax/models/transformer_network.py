"""The transformer as decoders and losses drive it, causal or block by block as its config says."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import BlockDiffusionConfig, TransformerConfig
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models.base import Work, apply, output, raw
from paradec_jax.models.prepare import prepare_params
from paradec_jax.models.transformer import Inputs, Layers, Transformer, parameter_shapes
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn import masks
from paradec_jax.nn.attention import once
from paradec_jax.nn.visibility import CAUSAL, Seen, by_block
from paradec_jax.sharding import axes


@functools.lru_cache
def _sizes(config: TransformerConfig) -> dict[str, int]:
    """Numbers of each part; found by tracing the whole network, which takes seconds for a deep one."""
    return axes.sizes(axes.TRANSFORMER, parameter_shapes(config))


@dataclasses.dataclass(frozen=True)
class TransformerNetwork:
    """The network as decoders and losses see it: equal by its config, parameters always an argument.

    Attributes:
      config: the model's shape.
    """

    config: TransformerConfig

    @property
    def module(self) -> Transformer:
        """The Linen module."""
        return Transformer(self.config)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for, in whole blocks of every length that it serves."""
        whole = math.lcm(*self.blocks)  # 1 of a causal model
        return self.config.max_length // whole * whole

    @property
    def counters(self) -> tuple[str, ...]:
        """Calls and positions say all that a call costs."""
        return ()

    @property
    def visibility(self) -> str:
        """A position sees itself and the ones before it, or its block whole and the blocks before it."""
        return "causal" if self.block is None else "block"

    @property
    def block(self) -> int | None:
        """Tokens of a block, counted from position 0; None of a causal model."""
        return self.config.block if isinstance(self.config, BlockDiffusionConfig) else None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Lengths of blocks that the checkpoint serves; none of a causal model."""
        if not isinstance(self.config, BlockDiffusionConfig):
            return ()
        return (self.config.block,) if self.config.blocks is None else self.config.blocks

    def work(self, batch: int, positions: int, context: int) -> Work:
        """The least that one call on `positions` positions of each row after `context` cached ones can cost.

        Weights are read once, keys and values of the context once a layer. A multiplication and an addition are
        two operations.
        """
        c = self.config
        weights = sum(_sizes(c).values()) + c.vocab_size * c.width
        cached = 2 * c.layers * c.kv_heads * c.head_dim * batch * context
        rows = batch * positions
        attention = 4 * c.layers * c.heads * c.head_dim * rows * (context + positions)
        moved = weights * jnp.dtype(c.param_dtype).itemsize + cached * jnp.dtype(c.dtype).itemsize
        return Work(moved, 2 * weights * rows + attention)

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a decoding loop wants them (`models.prepare`); prepared ones as they are."""
        return params if isinstance(params, Prepared) else Prepared(prepare_params(self.config, params))

    def _apply(self, params: Any, method: Callable, *args: Any) -> Any:
        return apply(Transformer, self.config, params, method, *args)

    def init_cache(self, keys: Array, size: int) -> Layers:
        """An empty cache for `size` positions of each row; `keys` [B] count the rows, nothing is drawn."""
        c = self.config
        return tuple(
            kv_cache.empty(len(keys), c.kv_heads, size, c.head_dim, jnp.dtype(c.dtype))
            for _ in range(c.layers)
        )

    def write(self, cache: Layers, window: Layers, at: Int[Array, "B"]) -> Layers:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return tuple(kv_cache.write(old, new, at) for old, new in zip(cache, window, strict=True))

    def pick(self, window: Layers, start: Int[Array, "B"], width: int) -> Layers:
        """Positions `start .. start + width - 1` of each row's window."""
        return tuple(kv_cache.pick(kv, start, width) for kv in window)

    def widen(self, window: Layers, width: int) -> Layers:
        """The window with room for `width` positions, the new ones zero."""
        return tuple(kv_cache.widen(kv, width) for kv in window)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. `forward` also takes vectors, such as mixtures `p @ embedding`."""
        return raw(params)["embedding"]

    def output(self, params: Any) -> Any:
        """Parameters for `logits` alone, which a loss makes in chunks: the output matrix is gathered once for all."""
        return output(params, self.config.dtype)

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores in at least float32."""
        return self._apply(params, Transformer.logits, hidden)

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
    ) -> Forward:
        """Reads a window. The caller stores the keys and values.

        Args:
          params: the parameters, raw or prepared.
          inputs, positions: the window's tokens, or a vector in the place of each, and absolute positions.
          prefix: the cache and what the window sees of it; None for no cache.
          mask: which window keys a query sees; by default the earlier ones and itself, or as far as its block goes.
        """
        if mask is None:
            block = self.block
            rule = CAUSAL if block is None else by_block(positions, block)
            mask = once(rule, positions.shape[1], self.config.attention)
        cache = prefix_mask = None
        if prefix is not None and prefix.visible is not None:
            cache = prefix.kv
            prefix_mask = masks.visible(prefix.visible, cache[0].v.shape[-2])
        hidden, own = self._apply(params, Transformer.hidden, inputs, positions, mask, cache, prefix_mask)
        return Forward(hidden, own, {})
