"""Buffers of rotary positions that checkpoints hold beside their weights."""

from typing import Any

import numpy as np

from .engine import ConvertError, Source


def inverse_frequencies(channels: int, base: float) -> np.ndarray:
    """Angles of the rotation at position 1, float32 [C/2], computed in float32."""
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    return np.float32(1) / np.float32(base) ** exponent


def check_rope(source: Source, name: str, ours: np.ndarray, base: float, **tolerance: Any) -> None:
    """Refuses a stored buffer, where there is one, that differs from ours by more than rounding."""
    stored = source.read(name).astype(np.float32) if name in source.tensors else ours
    if not np.allclose(stored, ours, **tolerance):
        raise ConvertError(f"tensor {name} contradicts rotary positions of base {base:g}")
