"""The recurrent-depth transformer (Geiping et al. 2025, Huginn-0125).

A prelude embeds tokens, a core refines a latent state as often as one likes, a coda reads the state
out::

    e = prelude(sqrt(D) * embedding[tokens])
    s <- core(adapter [s ; e])           repeated r times, from a random s
    logits = norm(coda(norm(s))) embedding^T
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.models.network import Inputs
from paradec_jax.nn.blocks import SandwichBlock, parameter, truncated_normal
from paradec_jax.nn.cache import Layers
from paradec_jax.nn.ends import Ends
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.scan import in_turn, reading
from paradec_jax.nn.visibility import Stream, View, whole_text


class RecurrentDepth(Ends):
    """Names the parameters; the three public parts are pure functions of them.

    Parameters: `embedding` [V, D], `prelude_i`, `core_i`, `coda_i` (sandwich blocks), `adapter`
    [2D, D] (state rows first), `final_norm` [D], and `head` [D, V] where the output matrix is not
    the embedding.
    """

    config: RecurrentDepthConfig

    def setup(self) -> None:
        c = self.config
        init, block = truncated_normal(c.init_std), rematerialised(SandwichBlock, c.remat)
        self.embedding = parameter(self, "embedding", init, (c.vocab_size, c.width))
        self.prelude = [block(c) for _ in range(c.prelude_layers)]
        self.adapter = parameter(self, "adapter", init, (2 * c.width, c.width))
        self.core = [block(c) for _ in range(c.core_layers)]
        self.coda = [block(c) for _ in range(c.coda_layers)]
        self.end()

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One pass with a zero state and one recurrence; touches every parameter, for `init`."""
        view = whole_text(self.config, tokens.shape)
        e, _ = self.embed(tokens, view)
        state, _ = self.iterate(jnp.zeros_like(e), e, view)
        hidden, _ = self.readout(state, view)
        return self.logits(hidden)

    def embed(self, tokens: Inputs, view: View) -> tuple[Stream, Layers]:
        """Prelude output e of tokens, or of vectors in their place."""
        dtype = jnp.dtype(self.config.dtype)
        vectors = self.embedding[tokens] if tokens.ndim == 2 else tokens
        x = vectors.astype(dtype) * jnp.asarray(self.config.width**0.5, dtype)
        return in_turn(reading(view), x, self.prelude, view.cache.prelude if view.cache else None)

    def iterate(
        self,
        state: Stream,
        e: Stream,
        view: View,
        prefix: Layers | None = None,
    ) -> tuple[Stream, Layers]:
        """One recurrence, `core(adapter [s ; e])`, over the cached keys of this recurrence."""
        x = dense(jnp.concatenate([state, e], axis=-1), self.adapter)
        return in_turn(reading(view), x, self.core, prefix)

    def readout(self, state: Stream, view: View) -> tuple[Stream, Layers]:
        """Input of the output matrix, `norm(coda(norm(s)))`, both norms with the same gain."""
        x = self.normalise(state)
        x, kv = in_turn(reading(view), x, self.coda, view.cache.coda if view.cache else None)
        return self.normalise(x), kv
