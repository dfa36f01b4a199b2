"""The one place where objectives take recorded draws, which a batch may bring in place of new ones.

::

    masked diffusion    time_uniforms [B], or [1] for systematic times; mask_uniforms [B, S]
    self-distillation   times [B]; mask_uniforms [B, S]; teacher_uniforms [m - 1 or more, B, S, V]
    block diffusion     hidden and probability [B, T]: which tokens are hidden, how likely each was to be
    forcing             the same, or mask_uniforms [B, T]
    residual            the same, and reveals [B, K, T]
    recurrent           recurrence []; state [B, T, D]
"""

from collections.abc import Callable
from typing import Any

from paradec_jax.objective import Batch


def recorded_or(batch: Batch, name: str, draw: Callable[[], Any]) -> Any:
    """What a batch brings under this name, or else what `draw` makes."""
    return batch[name] if name in batch else draw()
