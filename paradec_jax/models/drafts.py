"""Masks that guess: what drafts the next tokens of a causal model, whose own rows stay as they are.

::

    position    a-1    a  |  a+1    a+2    a+3      a the anchor: the text is known up to it
    row          t     t  |  m_1    m_2    m_3      rows of masks see the text, and the masks before them
    adapters     .     .  |   x      x      x       and they alone pass through the adapters
    drafts                |  a+2    a+3    a+4      the token that mask j stands for is that at a + j + 1

The text's row at a says itself which token comes next, so mask j drafts the one after that of its own
position. A sampler head of two layers tells it which token that became (W1 [2D, K], W2 [K, D]):

    z_j = h_j + silu([h_j ; norm(E[x_(a+j)])] W1) W2,      scores of the draft = z_j U

with embedding E and output matrix U of the model. (I-DLM, arXiv 2604.11035; gated adapters and the
head on the token before: "Your LLM knows the future", arXiv 2507.11851.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config import DraftConfig
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models.network import KVNetwork, raw
from paradec_jax.models.transformer import Transformer, TransformerNetwork
from paradec_jax.nn.adapters import beside, init_lora, laid_out
from paradec_jax.nn.blocks import rms_norm
from paradec_jax.nn.products import dense
from paradec_jax.nn.visibility import Seen
from paradec_jax.sharding import axes


@dataclasses.dataclass(frozen=True)
class DraftNetwork(KVNetwork):
    """A causal model and the rows of masks beside its text, as decoders and losses drive them.

    Token ids from V on are masks: V + j - 1 is mask j. Parameters are {"network": those of the
    model, "drafter": of what is beside it}; the latter are `masks` [k, D], `embedding_norm` [D],
    `sampler_in` [2D, K], `sampler_out` [K, D], and an adapter of the model's matrices.
    """

    config: DraftConfig
    table = axes.DRAFTS
    visibility = "causal"  # rows of text and of masks
    block = None

    @classmethod
    def shapes(cls, config: DraftConfig) -> dict[str, Any]:
        """Shapes and dtypes of the parameters beside the model's, without allocating any."""
        return jax.eval_shape(lambda: cls.init_params(config, jax.random.key(0)))

    @classmethod
    def init_params(
        cls, config: DraftConfig, key: Array, masks: Float[Array, "D"] | None = None
    ) -> dict[str, Any]:
        """Random parameters, float32: the adapters and the sampler head begin by adding nothing.

        Args:
          masks: the vector that every mask begins as, such as the mean of the embedding; zeros when
            None.
        """
        base, (of_lora, of_sampler) = config.base, jax.random.split(key)
        shape = TransformerNetwork.shapes(base)
        begin = jnp.zeros(base.width) if masks is None else masks.astype(jnp.float32)
        drawn = jax.random.normal(of_sampler, (2 * base.width, config.inner))
        return {
            "masks": jnp.tile(begin, (config.count, 1)),
            "embedding_norm": jnp.ones(base.width),
            "sampler_in": drawn * (2 * base.width) ** -0.5,
            "sampler_out": jnp.zeros((config.inner, base.width)),
            **init_lora(shape, axes.matrices(axes.TRANSFORMER), config.rank, of_lora),
        }

    def prepare(self, params: Any) -> Prepared:
        """The parameters beside the model's as a decoding loop wants them: adapters laid out, and
        matrices in the dtype of their products.
        """
        if isinstance(params, Prepared):
            return params
        layers = {name: part for name, part in params.items() if name.startswith("layer_")}
        matrices = {name: params[name] for name in ("sampler_in", "sampler_out")} | laid_out(layers)
        cast = jax.tree.map(lambda x: x.astype(self.config.base.dtype), matrices)
        return Prepared({**params, **cast})

    @property
    def base(self) -> TransformerNetwork:
        """The model's own network."""
        return TransformerNetwork(self.config.base)

    @property
    def count(self) -> int:
        """k, masks after an anchor."""
        return self.config.count

    @property
    def vocab_size(self) -> int:
        """V, the first id of a mask."""
        return self.base.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for."""
        return self.base.max_length

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
    ) -> Forward:
        """Reads a window of tokens and masks. The caller stores the keys and values of its tokens."""
        network, drafts = params["network"], raw(params["drafter"])
        parameters, is_mask = raw(network), inputs >= self.vocab_size
        tokens = jnp.where(is_mask, 0, inputs)
        which = jnp.clip(inputs - self.vocab_size, 0, self.count - 1)
        vectors = jnp.where(
            is_mask[..., None], drafts["masks"][which], parameters["embedding"][tokens]
        )
        layers = {name: part for name, part in drafts.items() if name.startswith("layer_")}
        if not isinstance(params["drafter"], Prepared):
            layers = laid_out(layers)
        joined = beside(parameters, layers)
        view = dataclasses.replace(self.base.view(positions, prefix, mask), adapted=is_mask)
        given = Prepared(joined) if isinstance(network, Prepared) else joined
        hidden, kv = self.base.apply(given, Transformer.hidden, vectors, view)
        return Forward(hidden, kv, {})

    def informed(
        self, params: Any, hidden: Float[Array, "*shape D"], before: Int[Array, "*shape"]
    ) -> Float[Array, "*shape D"]:
        """z, the states of masks that know the token before the one that they draft.

        Args:
          hidden: their own states h.
          before: that token.
        """
        embedding, drafts = raw(params["network"])["embedding"], raw(params["drafter"])
        vectors = embedding[before].astype(hidden.dtype)
        vectors = rms_norm(vectors, drafts["embedding_norm"], self.config.base.norm_eps)
        inner = dense(jnp.concatenate([hidden, vectors], axis=-1), drafts["sampler_in"])
        return hidden + dense(jax.nn.silu(inner), drafts["sampler_out"])

    def scores(
        self, params: Any, hidden: Float[Array, "*shape D"], tokens: Int[Array, "*shape C"]
    ) -> Float[Array, "*shape C"]:
        """The scores of some tokens, as `logits` of the model would have them."""
        network = raw(params["network"])
        if self.config.base.tie_embeddings:
            vectors = network["embedding"][tokens]
        else:
            vectors = jnp.moveaxis(network["head"][:, tokens], 0, -1)
        return jnp.einsum(
            "...d,...cd->...c",
            hidden,
            vectors.astype(hidden.dtype),
            preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
        )
