"""How varied the tokens of texts are."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

Samples = Sequence[Sequence[int]]


def sample_entropy(samples: Samples) -> float:
    """Entropy in nats of the tokens within a sample, its mean over the samples that have a token.

    Reported beside generative perplexity by BD3-LMs (Arriola et al. 2025, arXiv 2503.09573).

    Raises:
      ValueError: no sample has a token.
    """
    counts = [np.unique(np.asarray(row), return_counts=True)[1] for row in samples if len(row)]
    if not counts:
        raise ValueError("no sample has a token")
    return float(np.mean([entropy_of_counts(of) for of in counts]))


def entropy_of_counts(counts: Int[np.ndarray, "K"]) -> float:
    """Entropy `-sum_k p_k log p_k` in nats of a distribution given by counts, p their shares."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.sum(shares * np.log(1 / shares)))
