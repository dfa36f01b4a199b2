"""What the numbers of a config may be, whoever wrote it."""

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

MOST = 2**31 - 1  # sizes and positions are int32 on devices
MOST_RECURRENCES = 4096  # a call runs them one after the other
ATTENTIONS = ("dense", "blocked", "cudnn", "splash")  # backends of nn.attention
REMATS = ("none", "layer", "dots", "offload")  # of nn.remat
SMALLEST, LARGEST = 1e-37, 1e37  # normal numbers of float32, in which the network computes


class Shape:
    """What configs share: a base without fields for dataclasses with `width` and `heads`, perhaps `head_channels`."""

    width: int
    heads: int

    @property
    def head_dim(self) -> int:
        """C, channels of a head."""
        channels = getattr(self, "head_channels", None)
        return self.width // self.heads if channels is None else channels

    @property
    def init_std(self) -> float:
        """Standard deviation sqrt(2 / 5D) of embeddings, input matrices and initial states."""
        return math.sqrt(2 / (5 * self.width))

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def check_heads(config: Any) -> None:
    """Refuses heads that do not split, or of an odd number of channels. Raises ValueError."""
    if config.head_channels is not None:
        check_sizes(config, "head_channels")
    if config.heads % config.kv_heads:
        raise ValueError(f"heads {config.heads} must be a multiple of kv_heads {config.kv_heads}")
    if config.head_channels is None and config.width % config.heads:
        raise ValueError(f"width {config.width} does not split into {config.heads} heads: give head_channels")
    if config.head_dim < 2 or config.head_dim % 2:
        raise ValueError(f"a head must have an even number of channels, not {config.head_dim}")


def check_even(config: Any) -> None:
    """Refuses a width that does not split into heads of an even number of channels. Raises ValueError."""
    if config.width % config.heads or (config.width // config.heads) % 2:
        raise ValueError(
            f"width {config.width} must split into {config.heads} heads of an even number of channels"
        )


def check_sizes(config: Any, *names: str, most: int = MOST) -> None:
    """Refuses fields that are no whole numbers from 1 to `most`. Raises ValueError."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
        if int(value) < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        if int(value) > most:
            raise ValueError(f"{name} must be at most {most}, not {value}")


def check_positive(config: Any, *names: str) -> None:
    """Refuses fields that are not positive in float32: zero, below it, too large, NaN. Raises ValueError."""
    for name in names:
        value = getattr(config, name)
        if not SMALLEST <= value <= LARGEST:  # false for NaN
            raise ValueError(f"{name} must be a positive number of float32, not {value}")


def check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Refuses a field that is none of the words. Raises ValueError."""
    value = getattr(config, name)
    if value not in allowed:
        words = ", ".join(map(repr, allowed[:-1]))
        raise ValueError(f"{name} must be {words} or {allowed[-1]!r}, not {value!r}")


def check_words(owner: Any, **allowed: Iterable[str]) -> None:
    """Refuses fields that are none of their words. Raises ValueError."""
    for name, words in allowed.items():
        if getattr(owner, name) not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(owner, name)!r}")
