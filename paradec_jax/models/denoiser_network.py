"""The denoiser as samplers and losses drive it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import MaskedDiffusionConfig
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models.base import Work, apply, output, raw
from paradec_jax.models.denoiser import Denoiser, Inputs
from paradec_jax.models.prepare import prepare_denoiser
from paradec_jax.nn.visibility import Seen


@dataclasses.dataclass(frozen=True)
class DenoiserNetwork:
    """The network as samplers and losses see it: equal by its config, parameters always an argument.

    It keeps no cache: each call reads the whole canvas, since every position's keys depend on all others.

    Attributes:
      config: the model's shape.
    """

    config: MaskedDiffusionConfig

    @property
    def module(self) -> Denoiser:
        """The Linen module."""
        return Denoiser(self.config)

    @property
    def vocab_size(self) -> int:
        """V, the mask included."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest canvas the model was built for."""
        return self.config.max_length

    @property
    def counters(self) -> tuple[str, ...]:
        """Calls and positions say all that a call costs."""
        return ()

    @property
    def visibility(self) -> str:
        """A position sees the whole canvas."""
        return "full"

    @property
    def block(self) -> None:
        """There are no blocks."""
        return None

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

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a sampling loop wants them (`models.prepare`); prepared ones as they are."""
        return params if isinstance(params, Prepared) else Prepared(prepare_denoiser(params))

    def _apply(self, params: Any, method: Callable, *args: Any) -> Any:
        return apply(Denoiser, self.config, params, method, *args)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. `forward` also takes vectors, such as mixtures `p @ embedding`."""
        return raw(params)["embedding"]

    def output(self, params: Any) -> Any:
        """Parameters for `logits` alone, which a loss makes in chunks: the output matrix is gathered once for all."""
        return output(params, self.config.dtype)

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Scores of all V columns in at least float32; `decode.rules.subs` rules out the mask's."""
        return self._apply(params, Denoiser.logits, hidden)

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
        hidden = self._apply(params, Denoiser.hidden, inputs, positions, mask, dropout)
        return Forward(hidden, None, {})
