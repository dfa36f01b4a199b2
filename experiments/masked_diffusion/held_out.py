"""What held-out text costs under a model of characters: a bound for a denoiser, the likelihood for
a causal model.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec_jax import Model
from paradec_jax.data.text import windows
from paradec_jax.evaluate.bound import Bound, bounds
from paradec_jax.evaluate.likelihood import Span, log_likelihoods


def per_token(found: Sequence[Bound]) -> tuple[float, float]:
    """Nats a scored position over all rows, and the standard error of that ratio over rows and
    draws.

    R = sum n / sum c; its error is that of independent rows, `sqrt(N / (N - 1) sum (n_i - R c_i)^2)
    / sum c`, infinite for a single row.
    """
    nats, counts = np.asarray([(bound.nats, bound.count) for bound in found]).T
    mean = nats.sum() / counts.sum()
    if len(found) == 1:
        return float(mean), math.inf
    scale = len(found) / (len(found) - 1)
    return float(mean), float(math.sqrt(scale * np.sum((nats - mean * counts) ** 2)) / counts.sum())


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """How held-out text is judged.

    Attributes:
      length: of the windows.
      count: windows at most, spread evenly over the text; as many as fit when None.
      draws: of times and masks, a window.
      seed: of the draws.
    """

    length: int
    count: int | None = None
    draws: int = 8
    seed: int = 0

    def costs(self, model: Model, params: Any, ids: np.ndarray) -> list[Bound]:
        """Nats of each window: an upper bound for a denoiser, what it costs for a causal model."""
        most = len(ids) // self.length
        rows = windows(
            ids, self.length, None if self.count is None else min(self.count, most)
        ).tolist()
        spec = model.token_spec
        if spec.mask is not None:
            spans = [Span(tuple(row)) for row in rows]
            return bounds(
                model.network, params, spans, spec.mask, draws=self.draws, batch=32, seed=self.seed
            )
        assert spec.bos is not None
        wanted = [Span((spec.bos, *row), 1) for row in rows]
        found = log_likelihoods(model.network, params, wanted, batch=32)
        return [
            Bound(-float(scores.sum(dtype=np.float64)), 0.0, len(scores)) for scores, _ in found
        ]

    def per_token(self, model: Model, params: Any, ids: np.ndarray) -> dict[str, float]:
        """Nats a token, and their standard error over windows."""
        nats, error = per_token(self.costs(model, params, ids))
        return {"nats": nats, "nats_error": error}
