"""What begins and ends the networks that write text: embedding, final norm and output matrix."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.nn.backend import kernels, on_cuda
from paradec_jax.nn.blocks import ones, parameter, rms_norm, truncated_normal
from paradec_jax.nn.products import dense


def scores(
    hidden: Float[Array, "*shape D"], weight: Array, bias: Any = None, tied: bool = False
) -> Float[Array, "*shape V"]:
    """Logits: factors in the model's dtype, sums in at least float32. The matrix is [D, V], or with
    `tied` the embedding [V, D]; biases [V] or None.
    """
    logits = dense(hidden, weight.T if tied else weight, wide=True)
    return logits if bias is None else logits + bias.astype(logits.dtype)


def most_probable(
    c: Any, hidden: Float[Array, "*shape D"], weight: Array, bias: Any = None, tied: bool = False
) -> Int[Array, "*shape"]:
    """The token of the largest of `scores`, the first of equal ones; of few rows one kernel on CUDA
    (`head_kernel.most_probable`).
    """

    def plain(hidden: Array, weight: Array, bias: Any) -> Array:
        return jnp.argmax(scores(hidden, weight, bias, tied), axis=-1).astype(jnp.int32)

    hidden = lax.stop_gradient(hidden)
    rows, width = hidden.size // hidden.shape[-1], hidden.shape[-1]
    if width % 64 or not kernels(c.attention, rows, hidden, weight):
        return plain(hidden, weight, bias)
    from paradec_jax.nn import head_kernel  # late: importing Pallas takes a second

    kernel = functools.partial(head_kernel.most_probable, tied=tied)
    return on_cuda(kernel, plain, hidden, weight, bias)


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
        weight = self.head if self.has_head else self.embedding
        return scores(hidden, weight, tied=not self.has_head)

    def most_probable(self, hidden: Float[Array, "*shape D"]) -> Int[Array, "*shape"]:
        """The token of the largest of `logits`."""
        weight = self.head if self.has_head else self.embedding
        return most_probable(self.config, hidden, weight, tied=not self.has_head)
