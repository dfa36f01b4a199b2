"""Whether samples of texts have a known law."""

import math

import numpy as np


def excess(samples: np.ndarray, law: np.ndarray, symbols: int) -> float:
    """Pearson's chi-square over texts, in standard deviations beyond its mean."""
    index = samples @ symbols ** np.arange(samples.shape[1])[::-1]
    counts, expected = np.bincount(index, minlength=len(law)), law * len(samples)
    if (counts[expected == 0] > 0).any():
        return math.inf
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return (np.sum((counts - expected) ** 2 / expected) - freedom) / math.sqrt(2 * freedom)
