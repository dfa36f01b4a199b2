"""What begins and ends the networks that write text: embedding, final norm and output matrix."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from paradec_jax.nn.blocks import ones, parameter, rms_norm, truncated_normal
from paradec_jax.nn.products import dense


class Ends(nn.Module):
    """A module with an `embedding` [V, D], and with what `end` adds to it.

    Attributes:
      prepared: whether parameters come from `KVNetwork.prepare`: a laid-out head is used where it
        is there.
    """

    config: Any
    prepared: bool = False

    def end(self) -> None:
        """Makes `final_norm` [D], and `head` [D, V] where the output matrix is not the embedding."""
        c = self.config
        self.final_norm = ones(self, "final_norm", c.width)
        laid_out = self.prepared and self.has_variable("params", "head")
        self.has_head = laid_out or not c.tie_embeddings
        if self.has_head:
            init = truncated_normal(c.init_std)
            self.head = parameter(self, "head", init, (c.width, c.vocab_size))

    def normalise(self, state: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """The final norm."""
        return rms_norm(state, self.final_norm, self.config.norm_eps)

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores, factors in the model's dtype, sums and scores in at least float32."""
        return dense(hidden, self.head if self.has_head else self.embedding.T, wide=True)
