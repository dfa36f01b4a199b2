"""The shape of a residual head, which belongs to a backbone."""

import dataclasses
from typing import Any

from paradec_jax.config.bounds import (
    ATTENTIONS,
    REMATS,
    Shape,
    check_choice,
    check_heads,
    check_positive,
    check_sizes,
)

MOST_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class ResidualHeadConfig(Shape):
    """Shape of a residual head; but for their number its blocks are those of its backbone.

    Attributes:
      width: D.
      heads, kv_heads, head_channels, feed_forward: H, G, C and F of each block; C is D / H when None.
      layers: blocks, 1 to 8.
      block: tokens of a block of the backbone's text.
      max_length: longest sequence the backbone was built for.
      rope_base: base of the rotary embedding (half-split convention).
      norm_eps: epsilon of every RMSNorm.
      qkv_bias, qk_norm: as in the backbone.
      dtype: dtype of activations; norms and softmax are float32 whatever it is.
      param_dtype: dtype of parameters.
      attention: who computes it (`nn.attention`), "dense", all scores at once, "blocked", long windows some queries
        at a time, "cudnn", on CUDA in 16 bits, or "splash", on TPUs; the last two elsewhere as "blocked".
      remat: what backward passes compute anew of every block (`nn.remat`), "none", "layer", "dots" or "offload".
    """

    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    head_channels: int | None = None
    layers: int = 3
    block: int = 4
    max_length: int = 32_768
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: str = "blocked"
    remat: str = "none"

    family = "residual_head"

    def __post_init__(self) -> None:
        check_sizes(self, "width", "heads", "kv_heads", "feed_forward", "block", "max_length")
        check_positive(self, "rope_base", "norm_eps")
        check_choice(self, "attention", ATTENTIONS)
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"layers of a residual head must be 1 to {MOST_LAYERS}, not {self.layers}")
        check_heads(self)
        check_choice(self, "remat", REMATS)

    @classmethod
    def of(cls, backbone: Any, layers: int = 3) -> "ResidualHeadConfig":
        """The head of a backbone's config, with that many blocks.

        Raises:
          ValueError: a backbone that does not write blocks, or `layers` out of range.
        """
        if getattr(backbone, "block", None) is None:
            raise ValueError(
                f"a residual head needs a backbone that writes blocks, but one of family {backbone.family} does not"
            )
        shared = [field.name for field in dataclasses.fields(cls) if field.name != "layers"]
        return cls(layers=layers, **{name: getattr(backbone, name) for name in shared})


def check_fits(head: ResidualHeadConfig, backbone: Any) -> None:
    """Refuses a head that was not shaped for a backbone.

    Raises:
      ValueError: another width or block length, or a backbone that does not write blocks.
    """
    wanted = ResidualHeadConfig.of(backbone)
    for name in ("width", "block"):
        mine, theirs = getattr(head, name), getattr(wanted, name)
        if mine != theirs:
            raise ValueError(
                f"the residual head has {name} {mine}, but the backbone has {theirs}: it is another's"
            )
