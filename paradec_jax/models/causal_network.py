"""The causal transformer as decoders and losses drive it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import CausalConfig
from paradec_jax.models.axes import sizes
from paradec_jax.models.base import Forward, Prepared, Work
from paradec_jax.models.causal import Causal, Inputs, Layers, parameter_shapes
from paradec_jax.models.prepare import prepare_params
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn import masks


@dataclasses.dataclass(frozen=True)
class CausalNetwork:
    """The network as decoders and losses see it: equal by its config, parameters always an argument.

    Attributes:
      config: the model's shape.
    """

    config: CausalConfig

    @property
    def module(self) -> Causal:
        """The Linen module."""
        return Causal(self.config)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for."""
        return self.config.max_length

    @property
    def recurrence(self) -> int:
        """A causal network passes its layers once."""
        return 1

    def work(self, batch: int, positions: int, context: int, recurrence: int = 1) -> Work:
        """The least that one call on `positions` positions of each row behind `context` cached ones can cost.

        Weights are read once, keys and values of the context once a layer. A multiplication and an addition are
        two operations.
        """
        del recurrence
        c = self.config
        weights = sum(sizes(c, parameter_shapes(c)).values())
        cached = 2 * c.layers * c.kv_heads * c.head_dim * batch * context
        rows = batch * positions
        attention = 4 * c.layers * c.heads * c.head_dim * rows * (context + positions)
        moved = weights * jnp.dtype(c.param_dtype).itemsize + cached * jnp.dtype(c.dtype).itemsize
        return Work(moved, 2 * weights * rows + attention)

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a decoding loop wants them (`models.prepare`); prepared ones as they are."""
        return params if isinstance(params, Prepared) else Prepared(prepare_params(self.config, params))

    def _apply(self, params: Any, method: Callable, *args: Any) -> Any:
        prepared = isinstance(params, Prepared)
        module = Causal(self.config, prepared)
        return module.apply({"params": params.params if prepared else params}, *args, method=method)

    def init_cache(self, batch: int, size: int) -> Layers:
        """An empty cache for `size` positions a row."""
        c = self.config
        return tuple(
            kv_cache.empty(batch, c.kv_heads, size, c.head_dim, jnp.dtype(c.dtype)) for _ in range(c.layers)
        )

    def write(self, cache: Layers, window: Layers, at: Int[Array, "B"]) -> Layers:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return tuple(kv_cache.write(old, new, at) for old, new in zip(cache, window, strict=True))

    def pick(self, window: Layers, start: Int[Array, "B"], width: int) -> Layers:
        """Positions `start .. start + width - 1` of each row's window."""
        return tuple(kv_cache.pick(kv, start, width) for kv in window)

    def initial_state(self, keys: Array, scale: Float[Array, ""] | float = 1.0) -> Float[Array, "B W 0"]:
        """There is no latent state: vectors of no channels."""
        del scale
        return jnp.zeros((*keys.shape, 0), jnp.float32)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. `forward` also takes vectors, such as mixtures `p @ embedding`."""
        return (params.params if isinstance(params, Prepared) else params)["embedding"]

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores in at least float32."""
        return self._apply(params, Causal.logits, hidden)

    def forward(
        self,
        params: Any,
        tokens: Inputs,
        positions: Int[Array, "B W"],
        cache: Layers | None = None,
        visible: Int[Array, "B"] | None = None,
        state: Float[Array, "B W 0"] | None = None,
        recurrence: int | None = None,
        window_mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """Reads a window. The caller stores the keys and values.

        Args:
          params: the parameters.
          tokens, positions: the window and its absolute positions.
          cache, visible: the cache and how many of its positions each row may see; None for no cache.
          state, recurrence: there is neither; for the sake of decoders that serve recurrent networks too.
          window_mask: which window keys a query sees; the earlier ones and itself by default.
        """
        del state, recurrence
        if window_mask is None:
            window_mask = masks.causal(positions.shape[1])
        prefix_mask = None
        if cache is not None and visible is not None:
            prefix_mask = masks.prefix(visible, cache[0].v.shape[-2])
        hidden, own = self._apply(params, Causal.hidden, tokens, positions, window_mask, cache, prefix_mask)
        return Forward(hidden, self.initial_state(positions), own)
