"""Classifier-free guidance (LLaDA, arXiv 2502.09992, appendix A.2): what was given weighs more.

::

    z = u + (w + 1) (c - u)        c of the canvas, u of the canvas whose given tokens are masks too

Logits are linear in the states that the output matrix reads, so those are combined, and the product
with the vocabulary is made once. Both readings are one call of twice as many rows, whose cache has
an axis for the two, [B, 2, ...].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.records import choices


@choices
class Guided:
    """A network that reads every window twice.

    Attributes:
      network: the network.
      mask: id of the mask, which stands for what was given.
    """

    network: Any
    mask: int

    def forward(
        self,
        params: Any,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None,
        mask: Bool[Array, "B W W"] | None,
        given: Bool[Array, "B W"],
        scale: Float[Array, ""],
    ) -> Forward:
        """The combined states; keys and values of both readings."""
        kv = None if prefix is None else prefix.kv

        def read(tokens: Array, kv: Any) -> tuple[Array, Any, Any]:
            past = None if prefix is None else Prefix(kv, prefix.visible)
            out = self.network.forward(params, tokens, positions, past, mask)
            return out.hidden, out.kv, out.counts

        both = jnp.stack([tokens, jnp.where(given, self.mask, tokens)], axis=1)
        hidden, kv, counts = jax.vmap(read, (1, 1), (1, 1, 0))(both, kv)
        conditional, unconditional = hidden[:, 0], at_least_float32(hidden[:, 1])
        combined = unconditional + (scale + 1) * (conditional - unconditional)
        return Forward(combined, kv, jax.tree.map(lambda x: jnp.sum(x, axis=0), counts))

    def init_cache(self, keys: Array, size: int) -> Any:
        """An empty cache of both readings."""
        cache = self.network.init_cache(keys, size)
        return jax.tree.map(lambda x: jnp.stack([x, x], axis=1), cache)

    def write(self, cache: Any, window: Any, at: Int[Array, "B"]) -> Any:
        """The cache with a window stored from each row's position on."""
        return jax.vmap(self.network.write, (1, 1, None), 1)(cache, window, at)
