"""The denoiser of MDLM (Sahoo et al. 2024, arXiv 2406.07524) and SDTT (arXiv 2410.21035).

::

    x = embedding[tokens]
    x <- modulated block (x)             N blocks, in which every position sees all
    logits = (norm(x) w (1 + scale) + shift) head + head_bias

Shifts, scales and gates are made from a noise level (adaLN-zero). It is always zero, since the canvas itself tells
how much is masked: the layers are trained, and to a sampler they are constants of the weights (`models.prepare`).
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import MaskedDiffusionConfig
from paradec_jax.models.base import shapes_of
from paradec_jax.nn.blocks import BlockConfig, parameter, uniform
from paradec_jax.nn.modulated import ModulatedBlock, ModulatedConfig, modulation
from paradec_jax.nn.norms import layer_norm
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.rope import rotation
from paradec_jax.nn.scan import scanned
from paradec_jax.nn.visibility import Seen

Inputs = Int[Array, "B W"] | Float[Array, "B W D"]  # tokens, or a vector in the place of each
FREQUENCIES = 128  # of the noise level's cosines and sines
LONGEST = 10_000.0  # ratio of the first frequency to the last, and base of the rotary embedding
NORM_EPS = 1e-5


def noise_map(
    level: Float[Array, "R"],
    weight_in: Float[Array, "E K"],
    bias_in: Float[Array, "K"],
    weight_out: Float[Array, "K K"],
    bias_out: Float[Array, "K"],
) -> Float[Array, "R K"]:
    """`silu(features(s) W_in + b_in) W_out + b_out` of noise levels s, features 128 cosines, then 128 sines."""
    wide = [at_least_float32(leaf) for leaf in (weight_in, bias_in, weight_out, bias_out)]
    weight_in, bias_in, weight_out, bias_out = wide
    frequency = jnp.exp(-math.log(LONGEST) * jnp.arange(FREQUENCIES) / FREQUENCIES)
    angle = level[:, None] * frequency
    features = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    return dense(jax.nn.silu(dense(features, weight_in) + bias_in), weight_out) + bias_out


class Denoiser(nn.Module):
    """Names the parameters.

    Parameters: `embedding` [V, D]; `noise_in` [256, K], `noise_in_bias` [K], `noise_out` [K, K], `noise_out_bias` [K]
    (from a noise level to the blocks' vector); `layer_i` (modulated blocks); `final_norm` [D], `final_modulation`
    [K, 2, D] and `final_modulation_bias` [2, D] (shift, scale); `head` [D, V], `head_bias` [V].

    Attributes:
      config: the shape.
      prepared: whether parameters come from `models.prepare`: constants stand in the place of noise map, norms and
        modulations (`final_constants` [2, D] in that of the final ones).
    """

    config: MaskedDiffusionConfig
    prepared: bool = False

    def setup(self) -> None:
        c, kind, zeros = self.config, self.config.param_dtype, nn.initializers.zeros
        self.block = rematerialised(ModulatedBlock, c.remat)
        self.embedding = parameter(self, "embedding", uniform(c.width**-0.5), (c.vocab_size, c.width), kind)
        self.layer = [self.block(block_config(c), self.prepared) for _ in range(c.layers)]
        if self.prepared:
            self.final_constants = parameter(self, "final_constants", zeros, (2, c.width), "float32")
        else:
            self.noise = self._noise_parameters()
            self.final_norm = parameter(self, "final_norm", nn.initializers.ones, (c.width,), kind)
            shape = (c.conditioning, 2, c.width)
            self.final_modulation = parameter(self, "final_modulation", zeros, shape, kind)
            self.final_modulation_bias = parameter(self, "final_modulation_bias", zeros, shape[1:], kind)
        self.head = parameter(self, "head", zeros, (c.width, c.vocab_size), kind)
        self.head_bias = parameter(self, "head_bias", zeros, (c.vocab_size,), kind)

    def _noise_parameters(self) -> tuple[Any, ...]:
        """Weights and biases as `noise_map` takes them."""
        k, kind = self.config.conditioning, self.config.param_dtype
        bounds = {"in": (2 * FREQUENCIES) ** -0.5, "out": k**-0.5}
        found = []
        for name, rows in (("in", 2 * FREQUENCIES), ("out", k)):
            found.append(parameter(self, f"noise_{name}", uniform(bounds[name]), (rows, k), kind))
            found.append(parameter(self, f"noise_{name}_bias", uniform(bounds[name]), (k,), kind))
        return tuple(found)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One pass; touches every parameter, for `init`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(tokens, positions, None))

    def noise_map(self, level: Float[Array, "R"]) -> Float[Array, "R K"]:
        """What the blocks' vector is made from by a silu."""
        return noise_map(level, *self.noise)

    def hidden(
        self,
        tokens: Inputs,
        positions: Int[Array, "B W"],
        mask: Seen | None,
        dropout: Array | None = None,
        level: Float[Array, "_"] | None = None,
    ) -> Float[Array, "B W D"]:
        """Input of the output matrix at each position.

        Args:
          tokens, positions: the canvas and its absolute positions.
          mask: which positions each of them sees; all by default.
          dropout: key of a training step's dropped outputs; None drops nothing.
          level: noise level of all rows or of each; zero by default, which no model of this family was trained or is
            run without.
        """
        c, vector = self.config, None
        if not self.prepared:
            vector = jax.nn.silu(self.noise_map(jnp.zeros(1) if level is None else level))
        x = at_least_float32(self.embedding[tokens] if tokens.ndim == 2 else tokens)
        angles = rotation(positions, c.head_dim, LONGEST)
        key = None if c.dropout == 0 else dropout

        def of_layer(i: int | Array) -> Array | None:
            return None if key is None else jax.random.fold_in(key, i)

        if c.scan_layers and not self.is_initializing():
            block = self.block(block_config(c), self.prepared, parent=None)

            def body(x: Array, params: Any, i: Array) -> tuple[Array, None]:
                return block.apply({"params": params}, x, angles, mask, vector, of_layer(i)), None

            params = self.variables["params"]
            layers = [params[f"layer_{i}"] for i in range(c.layers)]
            x, _ = scanned(body, x, layers, c.dtype, jnp.arange(c.layers))
        else:
            for i, layer in enumerate(self.layer):
                x = layer(x, angles, mask, vector, of_layer(i))
        if vector is None:
            shift, scale = self.final_constants
        else:
            gains = (self.final_norm,)
            shift, scale = modulation(vector, self.final_modulation, self.final_modulation_bias, gains)
        return (layer_norm(x, scale, NORM_EPS) + shift).astype(c.dtype)

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Scores of all V columns, the mask's among them, in at least float32."""
        scores = dense(hidden, self.head, wide=True)
        return scores + self.head_bias.astype(scores.dtype)


def block_config(config: MaskedDiffusionConfig) -> ModulatedConfig:
    """The shape of every block."""
    c = config
    block = BlockConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        feed_forward=c.feed_forward,
        norm_eps=NORM_EPS,
        rotation="halves",
        std=c.width**-0.5,
        std_out=c.width**-0.5,
        uniform=True,
        attention=c.attention,
        param_dtype=c.param_dtype,
    )
    return ModulatedConfig(block, c.conditioning, c.dropout, c.dtype)


def parameter_shapes(config: MaskedDiffusionConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    return shapes_of(Denoiser, config, {"layer": "layers"})


def init_params(config: MaskedDiffusionConfig, key: Array) -> dict[str, Any]:
    """Random parameters: uniform up to 1 / sqrt(inputs), modulations and head zero, so that all logits are."""
    return jax.jit(Denoiser(config).init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
