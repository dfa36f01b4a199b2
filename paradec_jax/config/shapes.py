"""Shapes of models and facts of checkpoints, as frozen dataclasses."""

import dataclasses
import itertools
import math
from typing import Any, ClassVar

from paradec_jax.config import bounds
from paradec_jax.config.rotary import RopeScaling
from paradec_jax.records import choices


@dataclasses.dataclass(frozen=True)
class TokenSpec:
    """Special tokens of one checkpoint.

    A shared vocabulary is not a shared token table, so these ids belong to the checkpoint and are
    never guessed from the tokenizer.

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
        bounds.check_words(self, alignment=("next", "own"))


@choices
class Shape(bounds.Ranged):
    """What the shapes of all models share.

    Blocks (`nn.blocks`) read a shape as it is. A subclass therefore has, as fields or as facts of
    its family, G `kv_heads`, F `feed_forward`, `norm_eps`, `rope_base`, `biases` (which of queries,
    keys and values carry one: "", "qk" or "qkv"), `out_bias`, `mlp_bias`, `qk_norm`,
    `rope_scaling`, and `out_std` of random matrices that end a branch. A network's `visibility` is
    "causal", "block" or "full".

    Attributes:
      width: D, width of the residual stream.
      heads: H, query heads.
      max_length: longest sequence the model was built for.
      dtype: dtype of activations; norms, softmax and logits are float32 whatever it is.
      param_dtype: dtype of parameters.
      attention: who computes it (`nn.attention`), "dense", all scores at once, "blocked", long
        windows some queries at a time, "cudnn", on CUDA in 16 bits, or "splash", on TPUs; the last
        two elsewhere as "blocked". All but "dense" decode on CUDA by kernels for few rows.
      remat: what backward passes compute anew of every block (`nn.remat`), "none", "layer", "dots"
        or "offload".
    """

    width: int
    heads: int
    max_length: int
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: str = "blocked"
    remat: str = "none"

    family: ClassVar[str]
    visibility: ClassVar[str]
    # which channels turn together: "halves" (i, i + C/2) or "interleaved" (2i, 2i + 1)
    rotation = "halves"
    out_bias = mlp_bias = qk_norm = False
    uniform = False  # whether random matrices are uniform up to their `std`, or normal
    remats: ClassVar[tuple[str, ...]] = bounds.REMATS

    def __post_init__(self) -> None:
        bounds.check_positive(self, "rope_base", "norm_eps")
        super().__post_init__()
        bounds.check_words(self, attention=bounds.ATTENTIONS, remat=self.remats)
        kv_heads = self.kv_heads  # type: ignore[attr-defined]
        if self.heads % kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {kv_heads}")
        if getattr(self, "head_channels", None) is None and self.width % self.heads:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"a head must have an even number of channels, not {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """C, channels of a head."""
        return self.width // self.heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where it sees all; () where no layer has one."""
        return ()

    @property
    def init_std(self) -> float:
        """Standard deviation sqrt(2 / 5D) of embeddings, input matrices and initial states."""
        return math.sqrt(2 / (5 * self.width))

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)


@choices
class RecurrentDepthConfig(Shape):
    """Shape of a recurrent-depth model (Geiping et al. 2025, Huginn-0125): prelude, core, coda.

    Heads have C = D / H channels, and key-value heads are as many. Beside the words of `Shape`,
    `remat` may be "iteration": each recurrence is computed anew, unless a loss says otherwise.

    Attributes:
      vocab_size: V, rows of the embedding.
      feed_forward: F, inner width of the gated MLP.
      prelude_layers, core_layers, coda_layers: sandwich blocks of each part; the core is the
        repeated part.
      rope_base: base of the rotary embedding.
      norm_eps: epsilon of RMSNorm.
      qk_bias: whether queries and keys carry a learned bias (before the rotation).
      tie_embeddings: whether the output matrix is the embedding.
      mean_recurrence: default recurrences at inference, mean of the training draw.
      mean_backprop_depth: last recurrences of a training step that carry gradient, unless a loss
        says otherwise.
    """

    vocab_size: int
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

    family = "recurrent_depth"
    visibility = "causal"
    rotation = "interleaved"
    rope_scaling = None
    remats = ("iteration", *bounds.REMATS)
    BOUNDS = {"mean_backprop_depth": (1, bounds.MOST_RECURRENCES)}  # noqa: RUF012

    @property
    def kv_heads(self) -> int:
        """G = H."""
        return self.heads

    @property
    def biases(self) -> str:
        """Which projections carry a bias."""
        return "qk" if self.qk_bias else ""

    @property
    def effective_depth(self) -> int:
        """Layers a token passes at the mean recurrence: prelude + coda + core * mean_recurrence."""
        return self.prelude_layers + self.coda_layers + self.core_layers * self.mean_recurrence

    @property
    def out_std(self) -> float:
        """Standard deviation of random matrices that end a branch."""
        return self.init_std / (2 * self.effective_depth) ** 0.5


@choices
class PreNormConfig(Shape):
    """Shape of pre-norm blocks with a cache, as causal models, block diffusion and residual heads
    have them.

    Attributes:
      layers: N, blocks.
      kv_heads: G, key-value heads; each serves H / G consecutive query heads.
      feed_forward: F, inner width of the gated MLP.
      head_channels: C, channels of a head; D / H when None.
      rope_base: base of the rotary embedding.
      norm_eps: epsilon of RMSNorm.
      rope_scaling: how rotary positions are scaled, or None; a dictionary of its fields, as JSON
        has it, becomes one.
      qkv_bias: whether queries, keys and values carry a learned bias (Qwen2).
      out_bias: whether attention's output carries a learned bias.
      mlp_bias: whether the three products of the MLP do.
      qk_norm: whether queries and keys of each head pass an RMSNorm before the rotation (Qwen3).
    """

    layers: int
    kv_heads: int
    feed_forward: int
    head_channels: int | None = None
    max_length: int = 32_768
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        """C, channels of a head."""
        return self.head_channels or super().head_dim

    @property
    def biases(self) -> str:
        """Which projections carry a bias."""
        return "qkv" if self.qkv_bias else ""

    @property
    def out_std(self) -> float:
        """Standard deviation of random matrices that end a branch."""
        return self.init_std / (2 * self.layers) ** 0.5


@choices
class TransformerConfig(PreNormConfig):
    """Shape of a transformer; each family that has one adds what is its own.

    Attributes:
      vocab_size: V, rows of the embedding.
      tie_embeddings: whether the output matrix is the embedding.
      scan_layers: whether a window passes the blocks by a loop over their stacked parameters
        (`nn.scan`), which compiles one of them: for training deep models. A window that reads a
        cache does so with raw parameters alone; a decoder with them would stack the caches of all
        layers in every step, so prepare its parameters.
    """

    vocab_size: int
    tie_embeddings: bool = True
    scan_layers: bool = False


@choices
class CausalConfig(TransformerConfig):
    """Shape of a causal transformer: Qwen2 (the defaults), Qwen3 (query and key norms) or Llama (no
    biases).

    Attributes:
      sliding_window: positions that a layer with a sliding window sees, a query's own and those
        just before it; None where no layer has one.
      sliding_layers: which layers have it, repeated over all of them.
    """

    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = (True,)

    family = "causal"
    visibility = "causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if True not in self.sliding_layers or (
            self.sliding_window is None and False in self.sliding_layers
        ):
            raise ValueError(
                f"sliding_layers says which layers have the window {self.sliding_window}: not {self.sliding_layers}"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As of other shapes."""
        if self.sliding_window is None:
            return ()
        repeated = itertools.islice(itertools.cycle(self.sliding_layers), self.layers)
        return tuple(self.sliding_window if sliding else None for sliding in repeated)


@choices
class BlockDiffusionConfig(TransformerConfig):
    """Shape of a transformer that fills masks block by block: SDAR, the layers of Qwen3.

    A position sees its own block whole and the blocks before it; in training, blocks count from
    position 0 of the sequence.

    Attributes:
      block: tokens of a block, as in training.
      blocks: lengths that training mixed, ascending, `block` among them; None is `block` alone.
      origin: where blocks of a decoded text count from, "start" (position 0) or "padded" (the end
        of its prompt, in both directions, as if that had been padded on the left to whole blocks).
    """

    qkv_bias: bool = False
    qk_norm: bool = True
    tie_embeddings: bool = False
    block: int = 4
    blocks: tuple[int, ...] | None = None
    origin: str = "start"

    family = "block_diffusion"
    visibility = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds.check_words(self, origin=("start", "padded"))
        if not 1 <= self.block <= self.max_length:
            raise ValueError(
                f"block must be between 1 and max_length {self.max_length}, not {self.block}"
            )
        if self.blocks is None:
            return
        if not isinstance(self.blocks, tuple) or list(self.blocks) != sorted(
            {*self.blocks, self.block}
        ):
            raise ValueError(
                f"blocks must be ascending lengths with block {self.block} among them, not {self.blocks}"
            )
        if self.blocks[-1] > self.max_length:
            raise ValueError(
                f"blocks must be between 1 and max_length {self.max_length}, not {self.blocks}"
            )


@choices
class FullAttentionConfig(TransformerConfig):
    """Shape of a transformer that fills a canvas of masks, in which every position sees all: LLaDA,
    Dream and their relatives.
    """

    family = "full_attention"
    visibility = "full"


@choices
class MaskedDiffusionConfig(Shape):
    """Shape of a denoiser of masked text: MDLM (Sahoo et al. 2024) and the students of SDTT, which
    share it.

    Heads have C = D / H channels, and key-value heads are as many. The residual stream is float32
    in any case.

    Attributes:
      vocab_size: V, rows of the embedding, the mask's among them.
      layers: N, transformer blocks.
      conditioning: width of the vector that every block's shifts, scales and gates are made from.
      dropout: share of each branch's outputs that a training step drops.
      scan_layers: whether a canvas passes the blocks by a loop over their stacked parameters
        (`nn.scan`), which compiles one of them: for training deep models.
    """

    vocab_size: int
    layers: int
    conditioning: int = 128
    max_length: int = 1024
    dropout: float = 0.1
    attention: str = "cudnn"
    scan_layers: bool = False

    family = "masked_diffusion"
    visibility = "full"
    uniform = True
    biases = ""
    rope_scaling = None
    rope_base = 10_000.0
    norm_eps = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 2:
            raise ValueError(
                f"vocab_size must be at least 2, the mask and a token, not {self.vocab_size}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")

    @property
    def kv_heads(self) -> int:
        """G = H."""
        return self.heads

    @property
    def feed_forward(self) -> int:
        """F, inner width of the MLP."""
        return 4 * self.width

    @property
    def init_std(self) -> float:
        """Bound of random matrices that read the stream."""
        return self.width**-0.5

    out_std = init_std


ModelConfig = (
    RecurrentDepthConfig
    | CausalConfig
    | BlockDiffusionConfig
    | MaskedDiffusionConfig
    | FullAttentionConfig
)
