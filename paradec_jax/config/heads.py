"""Shapes of what stands beside a network: residual heads, and which backbone they fit; drafts."""

import dataclasses
from typing import Any

from paradec_jax.config.bounds import Ranged
from paradec_jax.config.shapes import CausalConfig, PreNormConfig
from paradec_jax.records import choices

MOST_HEAD_LAYERS = 8


@choices
class ResidualHeadConfig(PreNormConfig):
    """Shape of a residual head, 1 to 8 blocks; but for their number these are the blocks of its
    backbone.

    Attributes:
      block: tokens of a block of the backbone's text.
    """

    layers: int = 3
    qkv_bias: bool = False
    qk_norm: bool = True
    block: int = 4

    family = "residual_head"
    visibility = "block"

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= MOST_HEAD_LAYERS:
            raise ValueError(
                f"layers of a residual head must be 1 to {MOST_HEAD_LAYERS}, not {self.layers}"
            )
        super().__post_init__()

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


@choices
class DraftConfig(Ranged):
    """Shape of what drafts the tokens after those that a causal model has read: masks, adapters for
    their rows, and a sampler head.

    Attributes:
      base: shape of the model.
      count: k, tokens that are drafted, one by each mask.
      rank: r of the adapters.
      inner: inner width of the sampler head.
    """

    base: CausalConfig
    count: int
    rank: int
    inner: int

    BOUNDS = {"count": (1, 64)}  # noqa: RUF012
    family = "drafts"
