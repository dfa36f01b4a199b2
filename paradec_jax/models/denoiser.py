"""The denoiser of MDLM (Sahoo et al. 2024, arXiv 2406.07524) and SDTT (arXiv 2410.21035).

::

    x = embedding[tokens]
    x <- modulated block (x)             N blocks, in which every position sees all
    logits = (norm(x) w (1 + scale) + shift) head + head_bias

Shifts, scales and gates are made from a noise level (adaLN-zero). It is always zero, since the
canvas itself tells how much is masked: the layers are trained, and to a sampler they are constants
of the weights.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import MaskedDiffusionConfig
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models.network import Inputs, ModelNetwork
from paradec_jax.nn.blocks import layer_norm, ones, parameter, uniform, zeros
from paradec_jax.nn.ends import most_probable, scores
from paradec_jax.nn.modulated import ModulatedBlock, modulation
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.rope import rotation
from paradec_jax.nn.scan import in_turn, scanned
from paradec_jax.nn.visibility import Seen, Stream, View
from paradec_jax.sharding import axes

FREQUENCIES = 128  # of the noise level's cosines and sines
LONGEST = 10_000.0  # ratio of the first of these frequencies to the last


def noise_map(level: Float[Array, "R"], *leaves: Array) -> Float[Array, "R K"]:
    """`silu(features(s) W_in + b_in) W_out + b_out` of noise levels s.

    Features are 128 cosines, then 128 sines; leaves W_in [256, K], b_in [K], W_out [K, K], b_out
    [K].
    """
    weight_in, bias_in, weight_out, bias_out = map(at_least_float32, leaves)
    frequency = jnp.exp(-math.log(LONGEST) * jnp.arange(FREQUENCIES) / FREQUENCIES)
    angle = level[:, None] * frequency
    features = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    return dense(jax.nn.silu(dense(features, weight_in) + bias_in), weight_out) + bias_out


class Denoiser(nn.Module):
    """Names the parameters.

    Parameters: `embedding` [V, D]; `noise_in` [256, K], `noise_in_bias` [K], `noise_out` [K, K],
    `noise_out_bias` [K] (from a noise level to the blocks' vector); `layer_i` (modulated blocks);
    `final_norm` [D], `final_modulation` [K, 2, D] and `final_modulation_bias` [2, D] (shift,
    scale); `head` [D, V], `head_bias` [V].

    Attributes:
      prepared: whether parameters come from `DenoiserNetwork.prepare`: constants stand in the place
        of noise map, norms and modulations (`final_constants` [2, D] in that of the final ones).
    """

    config: MaskedDiffusionConfig
    prepared: bool = False

    def setup(self) -> None:
        c = self.config
        self.block = rematerialised(ModulatedBlock, c.remat)
        shape = (c.vocab_size, c.width)
        self.embedding = parameter(self, "embedding", uniform(c.init_std), shape)
        self.layer = [self.block(c, self.prepared) for _ in range(c.layers)]
        if self.prepared:
            self.final_constants = zeros(self, "final_constants", 2, c.width)
        else:
            noise, k = [], c.conditioning  # as `noise_map` takes them
            for name, rows in (("in", 2 * FREQUENCIES), ("out", k)):
                init = uniform(rows**-0.5)
                noise.append(parameter(self, f"noise_{name}", init, (rows, k)))
                noise.append(parameter(self, f"noise_{name}_bias", init, (k,)))
            self.noise = noise
            self.final_norm = ones(self, "final_norm", c.width)
            self.final_modulation = zeros(self, "final_modulation", k, 2, c.width)
            self.final_modulation_bias = zeros(self, "final_modulation_bias", 2, c.width)
        self.head = zeros(self, "head", c.width, c.vocab_size)
        self.head_bias = zeros(self, "head_bias", c.vocab_size)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W V"]:
        """One pass; touches every parameter, for `init`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(tokens, positions, None))

    def hidden(
        self,
        tokens: Inputs,
        positions: Int[Array, "B W"],
        mask: Seen | None,
        dropout: Array | None = None,
    ) -> Stream:
        """Input of the output matrix at each position.

        Args:
          tokens, positions: the canvas and its absolute positions.
          mask: which positions each of them sees; all by default.
          dropout: random key of a training step's dropped outputs; None drops nothing.
        """
        c, vector = self.config, None
        if not self.prepared:
            vector = jax.nn.silu(noise_map(jnp.zeros(1), *self.noise))
        x = at_least_float32(self.embedding[tokens] if tokens.ndim == 2 else tokens)
        view = View(rotation(positions, c.head_dim, c.rope_base), mask)
        keys = None
        if dropout is not None and c.dropout > 0:
            keys = [jax.random.fold_in(dropout, i) for i in range(c.layers)]

        def read(block: Any, x: Array, key: Array | None) -> tuple[Array, None]:
            return block(x, view, vector, key), None

        if c.scan_layers and not self.is_initializing():
            layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]
            block = self.block(c, self.prepared, parent=None)
            x, _ = scanned(read, x, block, layers, c.dtype, keys)
        else:
            x, _ = in_turn(read, x, self.layer, keys)
        if vector is None:
            shift, scale = self.final_constants
        else:
            weight, bias = self.final_modulation, self.final_modulation_bias
            shift, scale = modulation(vector, weight, bias, (self.final_norm,))
        return (layer_norm(x, scale, c.norm_eps) + shift).astype(c.dtype)

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Scores of all V columns, the mask's among them, in at least float32."""
        return scores(hidden, self.head, self.head_bias)

    def most_probable(self, hidden: Float[Array, "*shape D"]) -> Int[Array, "*shape"]:
        """The column of the largest of `logits`."""
        return most_probable(self.config, hidden, self.head, self.head_bias)


@dataclasses.dataclass(frozen=True)
class DenoiserNetwork(ModelNetwork):
    """The denoiser as samplers and losses drive it.

    It keeps no cache, and each call reads the whole canvas, since all positions' keys depend on
    all.
    """

    config: MaskedDiffusionConfig
    linen = Denoiser
    table = axes.MASKED_DIFFUSION
    subs = True

    def prepare(self, params: Any) -> Prepared:
        """As of other networks; and modulations at noise level zero are constants of the weights.

        Float32 `layer_i/constants` [6, D] and `final_constants` [2, D] replace noise map, norms and
        modulations.
        """
        if isinstance(params, Prepared):
            return params
        chosen = {name: params[name] for name in ("embedding", "head", "head_bias")}
        for name, constants in _constants(params).items():
            if name == "final":
                chosen["final_constants"] = constants
            else:
                parts = {part: params[name][part] for part in ("attention", "mlp")}
                chosen[name] = {"constants": constants, **parts}
        return super().prepare(chosen)

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
        """Reads a canvas; there are no keys and values to store. `dropout` is as of
        `Denoiser.hidden`.

        Raises:
          ValueError: a prefix.
        """
        if prefix is not None:
            raise ValueError("a denoiser keeps no cache: prefix must be None")
        hidden = self.apply(params, Denoiser.hidden, inputs, positions, mask, dropout)
        return Forward(hidden, None, {})


@jax.jit
def _constants(params: Mapping[str, Any]) -> dict[str, Array]:
    """The constants of each layer and of the end, in one program."""
    noise = (params[f"noise_{name}"] for name in ("in", "in_bias", "out", "out_bias"))
    vector = jax.nn.silu(noise_map(jnp.zeros(1), *noise))

    def constants(tree: Mapping[str, Any], prefix: str, *gains: str) -> Array:
        weight, bias = tree[f"{prefix}modulation"], tree[f"{prefix}modulation_bias"]
        vectors = modulation(vector, weight, bias, [tree[name] for name in gains])
        return jnp.concatenate(vectors)[:, 0]

    made = {
        name: constants(tree, "", "attention_norm", "mlp_norm")
        for name, tree in params.items()
        if isinstance(tree, Mapping)
    }
    return made | {"final": constants(params, "final_", "final_norm")}
