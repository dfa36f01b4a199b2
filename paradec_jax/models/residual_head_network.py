"""The residual head as decoders and losses drive it."""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models.network import LayeredNetwork, raw
from paradec_jax.models.residual_head import ResidualHead, parameter_shapes
from paradec_jax.nn.attention import once
from paradec_jax.nn.visibility import Seen, by_block
from paradec_jax.sharding import axes


@dataclasses.dataclass(frozen=True)
class ResidualHeadNetwork(LayeredNetwork):
    """A residual head: it corrects what a backbone says of a block.

    It reads vectors, `backbone.embedding(params)[tokens]` or mixtures of them, and what it returns is added to the
    backbone's head inputs: corrected scores are `backbone.logits(params, a + r)`.

    Attributes:
      config: the head's shape.
    """

    config: ResidualHeadConfig
    linen: ClassVar[Any] = ResidualHead
    shapes: ClassVar[Any] = staticmethod(parameter_shapes)
    table: ClassVar[Any] = axes.RESIDUAL_HEAD
    counters: ClassVar[tuple[str, ...]] = ("head_calls",)  # which no other counter holds
    visibility: ClassVar[str] = "block"

    @property
    def vocab_size(self) -> int:
        """None of its own: embedding and output matrix are the backbone's."""
        return 0

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.config.block

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Refuses: the head has no output matrix.

        Raises:
          TypeError: always.
        """
        raise TypeError("a residual head has no output matrix: ask its backbone for logits(params, a + r)")

    def forward(
        self,
        params: Any,
        vectors: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
        *,
        hidden: Float[Array, "B W D"],
    ) -> Forward:
        """The residual of a window, as `Forward.hidden`. The caller stores the keys and values.

        Args:
          params: the parameters, raw or prepared.
          vectors, positions: the embedding of each token after the reveals, and absolute positions.
          prefix: the head's own cache and what the window sees of it; None for no cache.
          mask: which window keys a query sees; its block and the ones before it by default.
          hidden: the backbone's head inputs before the reveals, or their sum with earlier residuals.

        Raises:
          ValueError: vectors of another width than the head's, which are another backbone's.
        """
        width = self.config.width
        if {vectors.shape[-1], hidden.shape[-1]} != {width}:
            raise ValueError(
                f"the head corrects vectors of width {width}, not of {hidden.shape[-1]}: it is another network's"
            )
        if mask is None:
            rule = by_block(positions, self.config.block)
            mask = once(rule, positions.shape[1], self.config.attention)
        inputs = vectors, hidden, positions, mask, *self.seen(prefix)
        variables = {"params": raw(params)}
        found, own = ResidualHead(self.config).apply(variables, *inputs, method=ResidualHead.residual)
        return Forward(found, own, {"head_calls": 1})
