"""The transformer block of diffusion models, whose branches are modulated by a vector."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.nn.blocks import (
    Attention,
    are_few,
    few_products,
    layer_norm,
    ones,
    parameter,
    uniform,
    zeros,
)
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import block_input
from paradec_jax.nn.visibility import Stream, View
from paradec_jax.sharding.rules import by_rows


def modulation(
    conditioning: Float[Array, "R K"],
    weight: Float[Array, "K M D"],
    bias: Float[Array, "M D"],
    gains: Sequence[Float[Array, "D"]],
) -> tuple[Float[Array, "R 1 D"], ...]:
    """M vectors `c W + b`, M / len(gains) for each norm: its shift, its scale, and perhaps its
    branch's gate.

    A norm's gain w is multiplied into its scale s: `norm(x) w (1 + s) + shift` needs `w (1 + s)`
    alone.
    """
    conditioning, weight = at_least_float32(conditioning), at_least_float32(weight)
    vectors = jnp.einsum("rk,kmd->mrd", conditioning, weight) + at_least_float32(bias)[:, None]
    parts = [vector[:, None] for vector in vectors]
    for i, gain in enumerate(gains):
        scale = i * (len(parts) // len(gains)) + 1
        parts[scale] = (1 + parts[scale]) * gain
    return tuple(parts)


def dropout(x: Float[Array, "*shape"], key: Array, rate: float) -> Float[Array, "*shape"]:
    """`x / (1 - rate)` with each number zero at that rate."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


class PlainMLP(nn.Module):
    """MLP `gelu(x W_up + b_up) W_down + b_down`, with the approximation of gelu by tanh.

    Parameters: `up` [D, F], `up_bias` [F], `down` [F, D], `down_bias` [D].
    """

    config: Any

    def setup(self) -> None:
        c, shape = self.config, (self.config.width, self.config.feed_forward)
        self.up = parameter(self, "up", uniform(c.init_std), shape)
        self.up_bias = parameter(self, "up_bias", uniform(shape[0] ** -0.5), shape[1:])
        init = uniform(shape[1] ** -0.5)
        self.down = parameter(self, "down", init, shape[::-1])
        self.down_bias = parameter(self, "down_bias", init, shape[:1])

    def __call__(self, x: Stream) -> Stream:
        """The branch's output, without the residual sum."""
        if are_few(self.config, x, self.up, self.down):
            (inner,) = few_products(x, [[self.up]], bias=self.up_bias)
            (out,) = few_products(inner, [[self.down]])
        else:
            inner = dense(x, self.up) + self.up_bias.astype(x.dtype)
            out = dense(jax.nn.gelu(inner, approximate=True), self.down)
        return out + self.down_bias.astype(x.dtype)


class ModulatedBlock(nn.Module):
    """A block whose norms are shifted and scaled, and whose branches are gated, by six vectors
    (DiT's adaLN).

    ::

        x <- x + gate_1 dropout(Attention(norm(x) w_1 (1 + scale_1) + shift_1))
        x <- x + gate_2 dropout(MLP(norm(x) w_2 (1 + scale_2) + shift_2))

    The stream x is at least float32, the branches compute in the config's dtype. Parameters:
    `attention_norm` and `mlp_norm` [D], `modulation` [K, 6, D] and `modulation_bias` [6, D] (shift,
    scale and gate of the first branch, then of the second), `attention`, `mlp`. Prepared parameters
    hold the six vectors themselves in the place of the first four: `constants` [6, D], the scales
    as `w (1 + scale)`.
    """

    config: Any
    prepared: bool = False

    def setup(self) -> None:
        c = self.config
        if self.prepared:
            self.constants = zeros(self, "constants", 6, c.width)
        else:
            self.attention_norm = ones(self, "attention_norm", c.width)
            self.mlp_norm = ones(self, "mlp_norm", c.width)
            self.modulation = zeros(self, "modulation", c.conditioning, 6, c.width)
            self.modulation_bias = zeros(self, "modulation_bias", 6, c.width)
        self.attention = Attention(c)
        self.mlp = PlainMLP(c)

    def __call__(
        self,
        x: Stream,
        view: View,
        conditioning: Float[Array, "_ K"] | None = None,
        key: Array | None = None,
    ) -> Stream:
        """The block's output; without a key nothing is dropped.

        Prepared parameters need no conditioning.
        """
        x = block_input(by_rows(x))
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.vectors(conditioning)
        keys = (None, None) if key is None else jax.random.split(key)
        mixed, _ = self.attention(self.normed(x, scale_1, shift_1), view)
        x = x + gate_1 * self.dropped(mixed, keys[0])
        mixed = self.mlp(self.normed(x, scale_2, shift_2))
        return by_rows(x + gate_2 * self.dropped(mixed, keys[1]))

    def vectors(self, conditioning: Array | None) -> tuple[Array, ...]:
        """Shift, scale and gate of each branch, [1, 1, D] or one a row."""
        if conditioning is None:
            return tuple(self.constants[:, None, None])
        gains = (self.attention_norm, self.mlp_norm)
        return modulation(conditioning, self.modulation, self.modulation_bias, gains)

    def normed(self, x: Array, scale: Array, shift: Array) -> Array:
        """A branch's input."""
        return (layer_norm(x, scale, self.config.norm_eps) + shift).astype(self.config.dtype)

    def dropped(self, branch: Array, key: Array | None) -> Array:
        """A branch's output after dropout, in the dtype of the stream."""
        branch = at_least_float32(branch)
        return branch if key is None else dropout(branch, key, self.config.dropout)
