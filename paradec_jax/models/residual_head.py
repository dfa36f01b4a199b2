"""The head of multi-token residual prediction (MRP): how a backbone's scores move when tokens are
revealed.

::

    e = norm(E[y])                         y: the block after some of its tokens were revealed
    u = norm(a)                            a: the backbone's hidden states of the block before that
    x = [e ; u] fusion                     [B, W, 2D] -> [B, W, D]
    x <- x + Attention(norm(x))            N blocks like the backbone's, of their own weights and cache
    x <- x + MLP(norm(x))
    r = norm(x)                            a + r: what the backbone would have said of y

Embedding E and output matrix U are the backbone's. U is linear, so U(a + r) adds the residual to
the logits.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models.network import KVNetwork, raw
from paradec_jax.nn.blocks import PreNormBlock, ones, parameter, rms_norm, truncated_normal
from paradec_jax.nn.cache import Layers
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import rematerialised
from paradec_jax.nn.scan import in_turn, reading
from paradec_jax.nn.visibility import Seen, View, whole_text
from paradec_jax.sharding import axes

INITS = ("normal_0.2", "ordinary", "zero_gain")


class ResidualHead(nn.Module):
    """Names the parameters.

    Parameters: `embedding_norm` and `hidden_norm` [D], `fusion` [2D, D] (the embedding's half
      first), `layer_i`
    (pre-norm blocks), `final_norm` [D].
    """

    config: ResidualHeadConfig

    def setup(self) -> None:
        c = self.config
        block = rematerialised(PreNormBlock, c.remat)
        self.embedding_norm = ones(self, "embedding_norm", c.width)
        self.hidden_norm = ones(self, "hidden_norm", c.width)
        of_fusion = truncated_normal(c.init_std)
        self.fusion = parameter(self, "fusion", of_fusion, (2 * c.width, c.width))
        self.layer = [block(c) for _ in range(c.layers)]
        self.final_norm = ones(self, "final_norm", c.width)

    def __call__(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W D"]:
        """One pass over zeros; touches every parameter, for `init`."""
        zeros = jnp.zeros((*tokens.shape, self.config.width))
        return self.residual(zeros, zeros, whole_text(self.config, tokens.shape))[0]

    def residual(
        self, vectors: Float[Array, "B W D"], hidden: Float[Array, "B W D"], view: View
    ) -> tuple[Float[Array, "B W D"], Layers]:
        """The residual r of each position of a window, and the window's keys and values."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        e = rms_norm(vectors.astype(dtype), self.embedding_norm, c.norm_eps)
        u = rms_norm(hidden.astype(dtype), self.hidden_norm, c.norm_eps)
        x = dense(jnp.concatenate([e, u], axis=-1), self.fusion)
        x, kv = in_turn(reading(view), x, self.layer, view.cache)
        return rms_norm(x, self.final_norm, c.norm_eps), kv


@dataclasses.dataclass(frozen=True)
class ResidualHeadNetwork(KVNetwork):
    """The head as decoders and losses drive it: it corrects what a backbone says of a block.

    It reads vectors, `backbone.embedding(params)[tokens]` or mixtures of them, and what it returns
    is added to the backbone's hidden states: corrected scores are `backbone.logits(params, a + r)`.
    """

    config: ResidualHeadConfig
    linen = ResidualHead
    table = axes.RESIDUAL_HEAD
    vocab_size = 0  # embedding and output matrix are the backbone's
    counters = ("head_calls",)  # which no other counter holds

    @classmethod
    def init_params(
        cls, config: ResidualHeadConfig, key: Array, init: str = "zero_gain"
    ) -> dict[str, Any]:
        """Random parameters.

        Args:
          init: "ordinary" draws matrices with std sqrt(2 / 5D) (branch outputs over sqrt(2 N)) and
            sets gains to 1, so that the residual is as large as the backbone's hidden states;
            "zero_gain" differs in `final_norm`, which is zero, so that the residual begins at zero;
            "normal_0.2" draws every parameter, gains of norms and biases included, from N(0,
            0.2^2), as the released heads began.

        Raises:
          ValueError: an unknown `init`.
        """
        if init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, not {init!r}")
        if init == "normal_0.2":
            leaves, tree = jax.tree.flatten(cls.shapes(config))
            keys = jax.random.split(key, len(leaves))
            drawn = [
                0.2 * jax.random.normal(k, x.shape, x.dtype)
                for k, x in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(tree, drawn)
        params = super().init_params(config, key)
        return (
            params | {"final_norm": jnp.zeros_like(params["final_norm"])}
            if init == "zero_gain"
            else params
        )

    def forward(
        self,
        params: Any,
        vectors: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
        *,
        hidden: Float[Array, "B W D"],
    ) -> Forward:
        """The residual of a window, as `Forward.hidden`. The caller stores the keys and values.

        Args:
          vectors: the embedding of each token after the reveals.
          prefix, mask: what the window sees of the head's own cache and of itself, as of `view`.
          hidden: the backbone's hidden states before the reveals, or their sum with earlier
            residuals.

        Raises:
          ValueError: vectors of another width than the head's, which are another backbone's.
        """
        width = self.config.width
        if {vectors.shape[-1], hidden.shape[-1]} != {width}:
            raise ValueError(
                f"the head corrects vectors of width {width}, not of {hidden.shape[-1]}: it is another network's"
            )
        inputs = vectors, hidden, self.view(positions, prefix, mask)
        residual, kv = self.module.apply(
            {"params": raw(params)}, *inputs, method=ResidualHead.residual
        )
        return Forward(residual, kv, {"head_calls": 1})


def inherited(config: ResidualHeadConfig, key: Array, backbone: Any) -> dict[str, Any]:
    """Parameters whose residual begins at zero, and whose blocks are copies of the backbone's first
    ones.

    These read the embeddings that they know: `fusion` begins as [1 ; draw], `embedding_norm` at the
    size of an embedding. `backbone` are the backbone's parameters; all else as in
    `ResidualHeadNetwork.init_params`.

    Raises:
      ValueError: a backbone of fewer layers.
    """
    names = [f"layer_{i}" for i in range(config.layers)]
    if missing := [name for name in names if name not in backbone]:
        raise ValueError(
            f"init inherited needs a backbone with {', '.join(missing)} for {config.layers} layers"
        )
    params = ResidualHeadNetwork.init_params(config, key)
    table, dtype = backbone["embedding"], config.param_dtype
    size = jnp.sqrt(jnp.mean(jnp.square(table.astype(jnp.float32))))
    return {
        **params,
        **{name: jax.tree.map(lambda x: jnp.array(x, dtype), backbone[name]) for name in names},
        "embedding_norm": jnp.full((config.width,), size, dtype),
        "fusion": params["fusion"].at[: config.width].set(jnp.eye(config.width, dtype=dtype)),
    }
