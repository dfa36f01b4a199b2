"""Shapes of models and facts of checkpoints, as frozen dataclasses."""

import dataclasses
from typing import ClassVar

from paradec_jax.config.bounds import (
    ATTENTIONS,
    MOST_RECURRENCES,
    REMATS,
    Shape,
    check_choice,
    check_even,
    check_heads,
    check_positive,
    check_sizes,
)


@dataclasses.dataclass(frozen=True)
class TokenSpec:
    """Special tokens of one checkpoint.

    A shared vocabulary is not a shared token table, so these ids belong to the checkpoint and are never
    guessed from the tokenizer.

    Attributes:
      bos: id put before every prompt, or None.
      stop: ids that end a generation (end of text, end of turn).
      pad: id that fills buffers beyond a row's length.
      mask: id of the mask of a denoiser, or None.
      alignment: which token the logits of position p predict: "next" (p + 1) or "own" (p).
    """

    bos: int | None = None
    stop: tuple[int, ...] = ()
    pad: int = 0
    mask: int | None = None
    alignment: str = "next"

    def __post_init__(self) -> None:
        if self.alignment not in ("next", "own"):
            raise ValueError(f"alignment must be 'next' or 'own', not {self.alignment!r}")


@dataclasses.dataclass(frozen=True)
class RecurrentDepthConfig(Shape):
    """Shape of a recurrent-depth model (Geiping et al. 2025, Huginn-0125): prelude, core, coda.

    Attributes:
      vocab_size: V, rows of the embedding.
      width: D, width of the residual stream and of the latent state.
      heads: H; key-value heads are as many, head channels are C = D / H.
      feed_forward: F, inner width of the gated MLP.
      prelude_layers, core_layers, coda_layers: sandwich blocks of each part; the core is the repeated part.
      max_length: longest sequence the model was built for.
      rope_base: base of the rotary embedding.
      norm_eps: epsilon of RMSNorm.
      qk_bias: whether queries and keys carry a learned bias (before the rotation).
      tie_embeddings: whether the output matrix is the embedding.
      mean_recurrence: default recurrences at inference, mean of the training draw.
      mean_backprop_depth: last recurrences of a training step that carry gradient, unless a loss is told otherwise.
      dtype: dtype of activations; norms, softmax and logits are float32 whatever it is.
      param_dtype: dtype of parameters.
      attention: who computes it (`nn.attention`), "dense", all scores at once, "blocked", long windows some queries
        at a time, "cudnn", on CUDA in 16 bits, or "splash", on TPUs; the last two elsewhere as "blocked".
      remat: what backward passes compute anew: "none", "iteration", each recurrence unless a loss is told otherwise,
        or of every block, by `nn.remat`, "layer", "dots" or "offload".
    """

    vocab_size: int
    width: int
    heads: int
    feed_forward: int
    prelude_layers: int = 2
    core_layers: int = 4
    coda_layers: int = 2
    max_length: int = 4096
    rope_base: float = 50_000.0
    norm_eps: float = 1e-6
    qk_bias: bool = True
    tie_embeddings: bool = True
    mean_recurrence: int = 32
    mean_backprop_depth: int = 8
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: str = "blocked"
    remat: str = "none"

    family = "recurrent_depth"

    def __post_init__(self) -> None:
        sizes = "vocab_size width heads feed_forward prelude_layers core_layers coda_layers max_length"
        check_sizes(self, *sizes.split())
        check_sizes(self, "mean_recurrence", "mean_backprop_depth", most=MOST_RECURRENCES)
        check_positive(self, "rope_base", "norm_eps")
        check_choice(self, "attention", ATTENTIONS)
        check_even(self)
        check_choice(self, "remat", ("iteration", *REMATS))

    @property
    def effective_depth(self) -> int:
        """Layers a token passes at the mean recurrence: prelude + coda + core * mean_recurrence."""
        return self.prelude_layers + self.coda_layers + self.core_layers * self.mean_recurrence


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Shape):
    """Shape of a transformer with pre-norm blocks and a cache; each family that has one adds what is its own.

    Attributes:
      vocab_size: V, rows of the embedding.
      width: D, width of the residual stream.
      layers: N, transformer blocks.
      heads: H, query heads.
      kv_heads: G, key-value heads; each serves H / G consecutive query heads.
      feed_forward: F, inner width of the gated MLP.
      head_channels: C, channels of a head; D / H when None.
      max_length: longest sequence the model was built for.
      rope_base: base of the rotary embedding (half-split convention).
      norm_eps: epsilon of RMSNorm.
      qkv_bias: whether queries, keys and values carry a learned bias (Qwen2).
      qk_norm: whether queries and keys of each head pass an RMSNorm before the rotation (Qwen3).
      tie_embeddings: whether the output matrix is the embedding.
      dtype: dtype of activations; norms, softmax and logits are float32 whatever it is.
      param_dtype: dtype of parameters.
      attention: who computes it (`nn.attention`), "dense", all scores at once, "blocked", long windows some queries
        at a time, "cudnn", on CUDA in 16 bits, or "splash", on TPUs; the last two elsewhere as "blocked".
      remat: what backward passes compute anew of every block (`nn.remat`), "none", "layer", "dots" or "offload".
      scan_layers: whether a window passes the blocks by a loop over their stacked parameters (`nn.scan`), which
        compiles one of them: for training deep models. A window that reads a cache does so with raw parameters alone;
        a decoder with them would stack the caches of all layers in every step, so prepare its parameters.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    head_channels: int | None = None
    max_length: int = 32_768
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    tie_embeddings: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: str = "blocked"
    remat: str = "none"
    scan_layers: bool = False

    family: ClassVar[str]

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "width", "layers", "heads", "kv_heads", "feed_forward", "max_length")
        check_positive(self, "rope_base", "norm_eps")
        check_choice(self, "attention", ATTENTIONS)
        check_heads(self)
        check_choice(self, "remat", REMATS)


@dataclasses.dataclass(frozen=True)
class CausalConfig(TransformerConfig):
    """Shape of a causal transformer: Qwen2 (the defaults), Qwen3 (query and key norms) or Llama (no biases)."""

    family = "causal"


@dataclasses.dataclass(frozen=True)
class BlockDiffusionConfig(TransformerConfig):
    """Shape of a transformer that fills masks block by block: SDAR, the layers of Qwen3.

    A position sees its own block whole and the blocks before it; blocks count from position 0 of the sequence.

    Attributes:
      block: tokens of a block, as in training.
      blocks: lengths that training mixed, ascending, `block` among them; None is `block` alone.
    """

    qkv_bias: bool = False
    qk_norm: bool = True
    tie_embeddings: bool = False
    block: int = 4
    blocks: tuple[int, ...] | None = None

    family = "block_diffusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.block <= self.max_length:
            raise ValueError(f"block must be between 1 and max_length {self.max_length}, not {self.block}")
        if self.blocks is None:
            return
        if not isinstance(self.blocks, tuple) or list(self.blocks) != sorted({*self.blocks, self.block}):
            raise ValueError(
                f"blocks must be ascending lengths with block {self.block} among them, not {self.blocks}"
            )
        if self.blocks[0] < 1 or self.blocks[-1] > self.max_length:
            raise ValueError(f"blocks must be between 1 and max_length {self.max_length}, not {self.blocks}")


@dataclasses.dataclass(frozen=True)
class MaskedDiffusionConfig(Shape):
    """Shape of a denoiser of masked text: MDLM (Sahoo et al. 2024) and the students of SDTT, which share it.

    Attributes:
      vocab_size: V, rows of the embedding, the mask's among them.
      width: D, width of the residual stream; the MLP is four times as wide.
      layers: N, transformer blocks.
      heads: H; key-value heads are as many, head channels are C = D / H.
      conditioning: width of the vector that every block's shifts, scales and gates are made from.
      max_length: longest canvas the model was built for.
      dropout: share of each branch's outputs that a training step drops.
      dtype: dtype of the products; the residual stream, norms, softmax and logits are float32 whatever it is.
      param_dtype: dtype of parameters.
      attention: who computes it (`nn.attention`), "dense", all scores at once, "blocked", long windows some queries
        at a time, "cudnn", on CUDA in 16 bits, or "splash", on TPUs; the last two elsewhere as "blocked".
      remat: what backward passes compute anew of every block (`nn.remat`), "none", "layer", "dots" or "offload".
      scan_layers: whether a canvas passes the blocks by a loop over their stacked parameters (`nn.scan`), which
        compiles one of them: for training deep models.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    conditioning: int = 128
    max_length: int = 1024
    dropout: float = 0.1
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: str = "cudnn"
    remat: str = "none"
    scan_layers: bool = False

    family = "masked_diffusion"

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "width", "layers", "heads", "conditioning", "max_length")
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, the mask and a token, not {self.vocab_size}")
        check_even(self)
        check_choice(self, "attention", ATTENTIONS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        check_choice(self, "remat", REMATS)

    @property
    def feed_forward(self) -> int:
        """F, inner width of the MLP."""
        return 4 * self.width


ModelConfig = RecurrentDepthConfig | CausalConfig | BlockDiffusionConfig | MaskedDiffusionConfig
