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
from jaxtyping import Array, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.models.base import shapes_of
from paradec_jax.models.recurrent_cache import Layers, RecurrentKV
from paradec_jax.nn.blocks import BlockConfig, PrefixMask, SandwichBlock, parameter, truncated_normal
from paradec_jax.nn.norms import rms_norm
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.rope import Rotation, rotation
from paradec_jax.nn.visibility import CAUSAL, Seen

Inputs = Int[Array, "B W"] | Float[Array, "B W D"]  # tokens, or a vector in the place of each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """All that a window of positions sees besides its own states: angles, masks and the cached prefix."""

    angles: Rotation
    seen: Seen
    cache: RecurrentKV | None = None
    prefix_mask: PrefixMask | None = None


class RecurrentDepth(nn.Module):
    """Names the parameters; the three public parts are pure functions of them.

    Parameters: `embedding` [V, D], `prelude_i`, `core_i`, `coda_i` (sandwich blocks), `adapter` [2D, D] (state
    rows first), `final_norm` [D], and `head` [D, V] where the output matrix is not the embedding.

    Attributes:
      config: the shape.
      prepared: whether parameters come from `models.prepare`: a laid-out head is used where it is there, and no
        loop over layers stacks their caches.
    """

    config: RecurrentDepthConfig
    prepared: bool = False

    def setup(self) -> None:
        c = self.config
        init, shape = truncated_normal(c.init_std), block_config(c)

        block = rematerialised(SandwichBlock, c.remat)

        def blocks(number: int) -> list[SandwichBlock]:
            return [block(shape) for _ in range(number)]

        self.embedding = parameter(self, "embedding", init, (c.vocab_size, c.width), c.param_dtype)
        self.prelude = blocks(c.prelude_layers)
        self.adapter = parameter(self, "adapter", init, (2 * c.width, c.width), c.param_dtype)
        self.core = blocks(c.core_layers)
        self.coda = blocks(c.coda_layers)
        self.final_norm = parameter(self, "final_norm", nn.initializers.ones, (c.width,), c.param_dtype)
        self.has_head = not c.tie_embeddings or (self.prepared and self.has_variable("params", "head"))
        if self.has_head:
            self.head = parameter(self, "head", init, (c.width, c.vocab_size), c.param_dtype)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One pass with a zero state and one recurrence; touches every parameter, for `init`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        c = self.config
        view = View(rotation(positions, c.head_dim, c.rope_base), CAUSAL)
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
        prefix_mask: PrefixMask | None = None,
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
        """Output scores, factors in the model's dtype, sums and scores in at least float32."""
        return dense(hidden, self.head if self.has_head else self.embedding.T, wide=True)

    def _blocks(
        self,
        blocks: Sequence[SandwichBlock],
        x: Float[Array, "B W D"],
        view: View,
        prefix: Layers | None,
        prefix_mask: PrefixMask | None,
    ) -> tuple[Float[Array, "B W D"], Layers]:
        own = []
        for i, block in enumerate(blocks):
            x, kv = block(x, view.angles, view.seen, prefix[i] if prefix else None, prefix_mask)
            own.append(kv)
        return x, tuple(own)


def block_config(config: RecurrentDepthConfig) -> BlockConfig:
    """The shape of every block."""
    c = config
    return BlockConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        feed_forward=c.feed_forward,
        norm_eps=c.norm_eps,
        rotation="interleaved",
        std=c.init_std,
        std_out=c.init_std / (2 * c.effective_depth) ** 0.5,
        biases="qk" if c.qk_bias else "",
        attention=c.attention,
        param_dtype=c.param_dtype,
    )


def parameter_shapes(config: RecurrentDepthConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    parts = ("prelude", "core", "coda")
    return shapes_of(RecurrentDepth, config, {part: f"{part}_layers" for part in parts})


def init_params(config: RecurrentDepthConfig, key: Array) -> dict[str, Any]:
    """Random parameters: std sqrt(2 / 5D), output matrices divided by sqrt(2 * effective depth)."""
    module = RecurrentDepth(config)
    return jax.jit(module.init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
