"""What the numbers of a config may be, whoever wrote it."""

import numbers
from collections.abc import Iterable
from typing import Any

MOST = 2**31 - 1  # sizes and positions are int32 on devices
MOST_RECURRENCES = 4096  # a call runs them one after the other
ATTENTIONS = ("dense", "blocked", "cudnn", "splash")  # backends of nn.attention
REMATS = ("none", "layer", "dots", "offload")  # of nn.remat
SMALLEST, LARGEST = 1e-37, 1e37  # normal numbers of float32, in which the network computes


def check_heads(config: Any) -> None:
    """Refuses heads that do not split, or of an odd number of channels. Raises ValueError."""
    if config.heads % config.kv_heads:
        raise ValueError(f"heads {config.heads} must be a multiple of kv_heads {config.kv_heads}")
    if getattr(config, "head_channels", None) is not None:
        check_sizes(config, "head_channels")
    elif config.width % config.heads:
        raise ValueError(f"width {config.width} does not split into {config.heads} heads")
    if config.head_dim % 2:
        raise ValueError(f"a head must have an even number of channels, not {config.head_dim}")


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


def check_words(owner: Any, **allowed: Iterable[str]) -> None:
    """Refuses fields that are none of their words. Raises ValueError."""
    for name, words in allowed.items():
        if getattr(owner, name) not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(owner, name)!r}")
