"""The transformer as decoders and losses drive it, causal or block by block as its config says."""

import dataclasses
import math
from typing import Any, ClassVar

from jaxtyping import Array, Int

from paradec_jax.config import BlockDiffusionConfig, TransformerConfig
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models.network import LayeredNetwork
from paradec_jax.models.transformer import Inputs, Transformer, parameter_shapes
from paradec_jax.nn.attention import once
from paradec_jax.nn.visibility import CAUSAL, Seen, by_block
from paradec_jax.sharding import axes


@dataclasses.dataclass(frozen=True)
class TransformerNetwork(LayeredNetwork):
    """A transformer, causal or of blocks.

    Attributes:
      config: the model's shape.
    """

    config: TransformerConfig
    linen: ClassVar[Any] = Transformer
    shapes: ClassVar[Any] = staticmethod(parameter_shapes)
    table: ClassVar[Any] = axes.TRANSFORMER

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for, in whole blocks of every length that it serves."""
        whole = math.lcm(*self.blocks)  # 1 of a causal model
        return self.config.max_length // whole * whole

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
        hidden, own = self.apply(params, Transformer.hidden, inputs, positions, mask, *self.seen(prefix))
        return Forward(hidden, own, {})
