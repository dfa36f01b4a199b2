"""The residual head as decoders and losses drive it."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models.base import Work, raw
from paradec_jax.models.residual_head import Layers, ResidualHead, parameter_shapes
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn import masks
from paradec_jax.nn.attention import once
from paradec_jax.nn.visibility import Seen, by_block
from paradec_jax.sharding import axes


@functools.lru_cache
def _sizes(config: ResidualHeadConfig) -> dict[str, int]:
    """Numbers of each part."""
    return axes.sizes(axes.RESIDUAL_HEAD, parameter_shapes(config))


@dataclasses.dataclass(frozen=True)
class ResidualHeadNetwork:
    """The network as decoders and losses see it: equal by its config, parameters always an argument.

    It reads vectors, `backbone.embedding(params)[tokens]` or mixtures of them, and what it returns is added to the
    backbone's head inputs: corrected scores are `backbone.logits(params, a + r)`.

    Attributes:
      config: the head's shape.
    """

    config: ResidualHeadConfig

    @property
    def module(self) -> ResidualHead:
        """The Linen module."""
        return ResidualHead(self.config)

    @property
    def vocab_size(self) -> int:
        """None of its own: embedding and output matrix are the backbone's."""
        return 0

    @property
    def max_length(self) -> int:
        """Longest sequence the backbone was built for."""
        return self.config.max_length

    @property
    def counters(self) -> tuple[str, ...]:
        """Its calls, which no other counter holds."""
        return ("head_calls",)

    @property
    def visibility(self) -> str:
        """A position sees its block and the ones before it."""
        return "block"

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.config.block

    def work(self, batch: int, positions: int, context: int) -> Work:
        """The least that one call on `positions` positions of each row after `context` cached ones can cost.

        Weights are read once, keys and values of the context once a layer; the scores that follow are the backbone's
        output matrix and not counted. A multiplication and an addition are two operations.
        """
        c, rows = self.config, batch * positions
        weights = sum(_sizes(c).values())
        cached = 2 * c.layers * c.kv_heads * c.head_dim * batch * context
        attention = 4 * c.layers * c.heads * c.head_dim * rows * (context + positions)
        moved = weights * jnp.dtype(c.param_dtype).itemsize + cached * jnp.dtype(c.dtype).itemsize
        return Work(moved, 2 * weights * rows + attention)

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are, marked as prepared."""
        return params if isinstance(params, Prepared) else Prepared(params)

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
        cache = prefix_mask = None
        if prefix is not None and prefix.visible is not None:
            cache = prefix.kv
            prefix_mask = masks.visible(prefix.visible, cache[0].v.shape[-2])
        inputs = vectors, hidden, positions, mask, cache, prefix_mask
        variables = {"params": raw(params)}
        found, own = ResidualHead(self.config).apply(variables, *inputs, method=ResidualHead.residual)
        return Forward(found, own, {"head_calls": 1})
