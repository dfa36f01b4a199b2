"""The denoiser as samplers and losses drive it."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from paradec_jax.config import MaskedDiffusionConfig
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models.denoiser import Denoiser, Inputs, parameter_shapes
from paradec_jax.models.network import ModelNetwork, Work
from paradec_jax.nn.visibility import Seen
from paradec_jax.sharding import axes


@dataclasses.dataclass(frozen=True)
class DenoiserNetwork(ModelNetwork):
    """A denoiser: it keeps no cache, and each call reads the whole canvas, since all positions' keys depend on all.

    Attributes:
      config: the model's shape.
    """

    config: MaskedDiffusionConfig
    linen: ClassVar[Any] = Denoiser
    shapes: ClassVar[Any] = staticmethod(parameter_shapes)
    table: ClassVar[Any] = axes.MASKED_DIFFUSION
    visibility: ClassVar[str] = "full"
    block: ClassVar[None] = None

    def work(self, batch: int, positions: int, context: int, logits: float | None = None) -> Work:
        """The least that one call on `positions` positions of each row can cost; there is no cached context to read.

        Weights are read once, and each is multiplied at every position, the output matrix at `logits` positions of
        each row (all when None). A multiplication and an addition are two operations.

        Raises:
          ValueError: a context.
        """
        if context:
            raise ValueError(f"a denoiser keeps no cache, so there is no context of {context} positions")
        c, rows = self.config, batch * positions
        weights, head = c.layers * (4 * c.width**2 + 2 * c.width * c.feed_forward), c.vocab_size * c.width
        attention = 4 * c.layers * c.width * rows * positions
        read = rows if logits is None else round(batch * logits)
        flops = 2 * weights * rows + 2 * head * read + attention
        return Work((weights + head) * jnp.dtype(c.param_dtype).itemsize, flops)

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
        *,
        dropout: Array | None = None,
    ) -> Forward:
        """Reads a canvas; there are no keys and values to store.

        Args:
          params: the parameters, raw or prepared.
          inputs, positions: the canvas's tokens, or a vector in the place of each, and absolute positions.
          prefix: None.
          mask: which positions each of them sees; all by default.
          dropout: key of a training step's dropped outputs; None drops nothing.

        Raises:
          ValueError: a prefix.
        """
        if prefix is not None:
            raise ValueError("a denoiser keeps no cache: prefix must be None")
        hidden = self.apply(params, Denoiser.hidden, inputs, positions, mask, dropout)
        return Forward(hidden, None, {})
