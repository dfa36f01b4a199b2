"""MAUVE of two collections of texts, from features that the user brings.

Both collections become histograms p and q over clusters of their features; with the mixture `r = w p + (1 - w) q` the
curve of `(exp(-c KL(q|r)), exp(-c KL(p|r)))` over w runs from (1, 0) to (0, 1), and MAUVE is the area under it: 1 for
equal histograms. Source: Pillutla et al. 2021, arXiv 2102.01454; c is its scaling factor.

SDTT took features of GPT-2 large on the first 100 tokens of each text, c = 5 and five clusterings. Clusters come from
SciPy's k-means, those of the authors' program from another library, so scores are not theirs to the last digit.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

SCALING = 5.0
SEEDS = (1, 2, 3, 4, 5)
POINTS = 25
VARIANCE = 0.9
TRIES = 5


@dataclasses.dataclass(frozen=True)
class Mauve:
    """Area under the frontier of several clusterings.

    Attributes:
      mean, spread: over the clusterings, the spread a standard deviation.
      scores: of each clustering.
      clusters: asked for of each.
    """

    mean: float
    spread: float
    scores: tuple[float, ...]
    clusters: int


def mauve(
    reference: Float[np.ndarray, "N D"],
    sampled: Float[np.ndarray, "M E"],
    *,
    clusters: int | None = None,
    scaling: float = SCALING,
    seeds: Sequence[int] = SEEDS,
) -> Mauve:
    """MAUVE of sampled texts against reference texts.

    Features are scaled to unit length and projected on the principal components that hold 90% of their variance, both
    collections together, as the authors' program does.

    Args:
      reference, sampled: a vector of features a text.
      clusters: a tenth of the smaller collection when None, at least 2.
      scaling: c.
      seeds: of the clusterings.

    Raises:
      ValueError: features of other shapes or that are not finite, fewer texts than clusters, or no seed.
    """
    if reference.ndim != 2 or sampled.ndim != 2 or reference.shape[1:] != sampled.shape[1:]:
        raise ValueError(
            f"features must be [texts, D] of one D, not of shapes {reference.shape} and {sampled.shape}"
        )
    everything = np.concatenate([reference, sampled]).astype(np.float64)
    smaller = min(len(reference), len(sampled))
    clusters = max(2, round(smaller / 10)) if clusters is None else clusters
    if not 2 <= clusters <= smaller:
        raise ValueError(
            f"clusters must be 2 to {smaller}, the texts of the smaller collection, not {clusters}"
        )
    if not np.isfinite(everything).all():
        raise ValueError("features must be finite numbers")
    if not seeds or scaling <= 0:
        raise ValueError(f"need a seed and a scaling above 0, not {list(seeds)} and {scaling}")
    points = projected(everything)
    scores = []
    for seed in seeds:
        labels = clustered(points, clusters, seed)
        p, q = (
            np.bincount(part, minlength=clusters) / len(part) for part in np.split(labels, [len(reference)])
        )
        scores.append(frontier_area(p, q, scaling))
    return Mauve(float(np.mean(scores)), float(np.std(scores)), tuple(scores), clusters)


def frontier_area(
    p: Float[np.ndarray, "K"], q: Float[np.ndarray, "K"], scaling: float = SCALING, points: int = POINTS
) -> float:
    """Area under the frontier of two histograms, by trapezoids between `points` mixtures and both axes."""
    weights = np.linspace(1e-6, 1 - 1e-6, points)
    mixtures = [w * p + (1 - w) * q for w in weights]
    x = np.exp(-scaling * np.asarray([np.inf, *(_divergence(q, r) for r in reversed(mixtures)), 0.0]))
    y = np.exp(-scaling * np.asarray([0.0, *(_divergence(p, r) for r in reversed(mixtures)), np.inf]))
    return float(np.trapezoid(y, x))


def projected(features: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N E"]:
    """Features of unit length on their first principal components, as many as hold `VARIANCE` of the variance."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths == 0, 1.0, lengths)
    centred = unit - unit.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    held = np.cumsum(sizes**2)
    kept = int(np.searchsorted(held, VARIANCE * held[-1])) + 1
    return (left * sizes)[:, :kept]


def clustered(points: Float[np.ndarray, "N E"], clusters: int, seed: int) -> Int[np.ndarray, "N"]:
    """The cluster of each point, of the best of several runs of k-means."""
    from scipy.cluster.vq import kmeans, vq  # here, because it takes long and decoding alone needs none

    centres, _ = kmeans(points, clusters, iter=TRIES, seed=np.random.default_rng(seed))
    return vq(points, centres)[0]


def _divergence(p: np.ndarray, r: np.ndarray) -> float:
    """KL(p | r) in nats; r is above 0 wherever p is."""
    some = p > 0
    return float(np.sum(p[some] * np.log(p[some] / r[some])))
