"""The recurrent-depth transformer (Geiping et al. 2025, Huginn-0125).

A prelude embeds tokens, a core refines a latent state as often as one likes, a coda reads the state out::

    e = prelude(sqrt(D) * embedding[tokens])
    s <- core(adapter [s ; e])           repeated r times, from a random s
    logits = norm(coda(norm(s))) embedding^T
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.models.recurrent_cache import Layers, RecurrentKV
from paradec_jax.nn import masks
from paradec_jax.nn.blocks import SandwichBlock, dense, truncated_normal
from paradec_jax.nn.norms import rms_norm
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.nn.rope import Rotation, rotation

Inputs = Int[Array, "B W"] | Float[Array, "B W D"]  # tokens, or a vector in the place of each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """All that a window of positions sees besides its own states: angles, masks and the cached prefix."""

    angles: Rotation
    window_mask: Bool[Array, "*B W W"]
    cache: RecurrentKV | None = None
    prefix_mask: Bool[Array, "B *W S"] | None = None


# For optimizers that treat matrices apart: (input axes, output axes) of the parameters found by these regexes.
MATRIX_AXES = {
    "attention/qkv$": ((0,), (2, 3)),
    "attention/out$": ((0, 1), (2,)),
    "mlp/gate_up$": ((0,), (2,)),
    "mlp/down$": ((0,), (1,)),
    "adapter$": ((0,), (1,)),
}


class RecurrentDepth(nn.Module):
    """Names the parameters; the three public parts are pure functions of them.

    Parameters: `embedding` [V, D], `prelude_i`, `core_i`, `coda_i` (sandwich blocks), `adapter` [2D, D] (state
    rows first), `final_norm` [D], and `head` [D, V] where the output matrix is not the embedding.
    """

    config: RecurrentDepthConfig

    def setup(self) -> None:
        c = self.config
        dtype, param_dtype = jnp.dtype(c.dtype), jnp.dtype(c.param_dtype)
        std, std_out = c.init_std, c.init_std / (2 * c.effective_depth) ** 0.5

        def block() -> SandwichBlock:
            return SandwichBlock(
                c.width, c.heads, c.feed_forward, c.qk_bias, c.norm_eps, std, std_out, dtype, param_dtype
            )

        self.embedding = self.param("embedding", truncated_normal(std), (c.vocab_size, c.width), param_dtype)
        self.prelude = [block() for _ in range(c.prelude_layers)]
        self.adapter = self.param("adapter", truncated_normal(std), (2 * c.width, c.width), param_dtype)
        self.core = [block() for _ in range(c.core_layers)]
        self.coda = [block() for _ in range(c.coda_layers)]
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.width,), param_dtype)
        self.has_head = not c.tie_embeddings or self.has_variable("params", "head")
        if self.has_head:
            self.head = self.param("head", truncated_normal(std), (c.width, c.vocab_size), param_dtype)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One pass with a zero state and one recurrence; touches every parameter, for `init`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        c = self.config
        view = View(rotation(positions, c.head_dim, c.rope_base), masks.causal(tokens.shape[1]))
        e, _ = self.embed(tokens, view)
        state, _ = self.iterate(jnp.zeros_like(e), e, view)
        hidden, _ = self.readout(state, view)
        return self.logits(hidden)

    def embed(self, tokens: Inputs, view: View) -> tuple[Float[Array, "B W D"], Layers]:
        """Prelude output e, constant through all recurrences, of tokens or of vectors in their place."""
        dtype = jnp.dtype(self.config.dtype)
        vectors = self.embedding[tokens] if tokens.ndim == 2 else tokens
        x = vectors.astype(dtype) * jnp.asarray(self.config.width**0.5, dtype)
        return self._blocks(
            self.prelude, x, view, view.cache.prelude if view.cache else None, view.prefix_mask
        )

    def iterate(
        self,
        state: Float[Array, "B W D"],
        e: Float[Array, "B W D"],
        view: View,
        prefix: Layers | None = None,
        prefix_mask: Bool[Array, "B *W S"] | None = None,
    ) -> tuple[Float[Array, "B W D"], Layers]:
        """One recurrence, `core(adapter [s ; e])`, over the cached keys of this recurrence."""
        x = dense(jnp.concatenate([state, e], axis=-1), self.adapter)
        return self._blocks(self.core, x, view, prefix, prefix_mask)

    def readout(self, state: Float[Array, "B W D"], view: View) -> tuple[Float[Array, "B W D"], Layers]:
        """Input of the output matrix, `norm(coda(norm(s)))`, both norms with the same gain."""
        x = self.normalise(state)
        x, own = self._blocks(self.coda, x, view, view.cache.coda if view.cache else None, view.prefix_mask)
        return self.normalise(x), own

    def normalise(self, state: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """The final norm, which reads a state out and ends the coda."""
        return rms_norm(state, self.final_norm, self.config.norm_eps)

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores, multiplied in the model's dtype and returned in at least float32."""
        scores = dense(hidden, self.head if self.has_head else self.embedding.T)
        return at_least_float32(scores)

    def _blocks(
        self,
        blocks: Sequence[SandwichBlock],
        x: Float[Array, "B W D"],
        view: View,
        prefix: Layers | None,
        prefix_mask: Bool[Array, "B *W S"] | None,
    ) -> tuple[Float[Array, "B W D"], Layers]:
        own = []
        for i, block in enumerate(blocks):
            x, kv = block(x, view.angles, view.window_mask, prefix[i] if prefix else None, prefix_mask)
            own.append(kv)
        return x, tuple(own)


def parameter_shapes(config: RecurrentDepthConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    shapes = jax.eval_shape(RecurrentDepth(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return shapes["params"]


def init_params(config: RecurrentDepthConfig, key: Array) -> dict[str, Any]:
    """Random parameters: std sqrt(2 / 5D), output matrices divided by sqrt(2 * effective depth)."""
    module = RecurrentDepth(config)
    return jax.jit(module.init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
