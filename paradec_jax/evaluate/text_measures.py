"""How varied sampled texts are, and how alike: entropies, distinct n-grams, self-BLEU. All logarithms are natural.

A judge's perplexity alone rewards texts that repeat themselves, so it is always read beside these. Entropies and
distinct n-grams are those of what was drawn: they depend on how much that is, so compare equal numbers of samples of
equal length.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from paradec_jax.evaluate.intervals import jackknife

Samples = Sequence[Sequence[int]]
ORDERS = (1, 2, 3, 4)
NO_SACREBLEU = "self-BLEU needs sacrebleu, which is missing: install paradec-jax[eval]"


@dataclasses.dataclass(frozen=True)
class Variety:
    """How varied the tokens of N samples are.

    Attributes:
      unigram_entropy, fourgram_entropy: `entropy` of orders 1 and 4, in nats.
      unigram_interval, fourgram_interval: their 95% intervals, by jackknife over samples.
      sample_entropy: see `sample_entropy`.
      distinct: different n-grams over n-grams of all samples together, of the orders 1 to 4 (Li et al. 2016, arXiv
        1510.03055).
    """

    unigram_entropy: float
    unigram_interval: tuple[float, float]
    fourgram_entropy: float
    fourgram_interval: tuple[float, float]
    sample_entropy: float
    distinct: tuple[float, ...]


def variety(samples: Samples) -> Variety:
    """All measures of tokens at once.

    Raises:
      ValueError: no sample with 4 tokens.
    """
    grams = {n: _grams(samples, n) for n in ORDERS}

    def of(n: int) -> tuple[float, tuple[float, float]]:
        codes, owners = grams[n]

        def measure(kept: np.ndarray) -> float:
            return _entropy(np.bincount(codes[kept[owners]]))

        return measure(np.ones(len(samples), bool)), jackknife(measure, len(samples))

    unigram, fourgram = of(1), of(4)
    kinds = tuple(int(codes.max() + 1) / len(codes) for codes, _ in grams.values())
    return Variety(*unigram, *fourgram, sample_entropy(samples), kinds)


def entropy(samples: Samples, n: int = 1) -> float:
    """Entropy `-sum_g p(g) log p(g)` in nats of the n-grams of all samples together, p their shares.

    Raises:
      ValueError: no sample with n tokens.
    """
    return _entropy(np.bincount(_grams(samples, n)[0]))


def sample_entropy(samples: Samples) -> float:
    """Entropy in nats of the tokens within a sample, its mean over the samples that have a token.

    Reported beside generative perplexity by BD3-LMs (Arriola et al. 2025, arXiv 2503.09573).

    Raises:
      ValueError: no sample with a token.
    """
    found = [_entropy(np.unique(np.asarray(row), return_counts=True)[1]) for row in samples if len(row)]
    if not found:
        raise ValueError("no sample has a token")
    return float(np.mean(found))


def self_bleu(groups: Sequence[Sequence[str]]) -> float:
    """BLEU of each text with the other ones of its group as references, the mean over a group, then over groups.

    0 to 100: 100 are copies. A group holds the continuations of one prompt (SDTT: Deschenaux and Gulcehre 2024,
    arXiv 2410.21035, eq. 8, which counts to 1), or texts that were drawn without one (Zhu et al. 2018, arXiv
    1802.01886). Words and punctuation are split by sacrebleu's "13a", case counts, orders above a text's length are
    left out, and zero counts are smoothed by its "exp".

    Args:
      groups: at least two texts each.

    Raises:
      ValueError: no group, or one of fewer than two texts.
      ImportError: sacrebleu is missing.
    """
    if not groups or min(map(len, groups)) < 2:
        raise ValueError("self-BLEU needs groups of at least two texts")
    bleu = _bleu()

    def of(texts: Sequence[str]) -> float:
        others = ([*texts[:i], *texts[i + 1 :]] for i in range(len(texts)))
        scores = [bleu.sentence_score(text, rest).score for text, rest in zip(texts, others, strict=True)]
        return math.fsum(scores) / len(scores)

    return math.fsum(map(of, groups)) / len(groups)


def has_sacrebleu() -> bool:
    """Whether `self_bleu` can be computed."""
    return importlib.util.find_spec("sacrebleu") is not None


def _bleu() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError(NO_SACREBLEU) from error
    return BLEU(effective_order=True)


def _grams(samples: Samples, n: int) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """The number of the kind of each n-gram, kinds counted from 0, and of the sample that it stands in."""
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    rows = [np.asarray(row, np.int64) for row in samples]
    counts = [max(len(row) - n + 1, 0) for row in rows]
    if not sum(counts):
        raise ValueError(f"no sample has {n} token{'s' if n > 1 else ''}")
    windows = [np.lib.stride_tricks.sliding_window_view(row, n) for row in rows if len(row) >= n]
    _, codes = np.unique(np.concatenate(windows), axis=0, return_inverse=True)
    return codes.reshape(-1), np.repeat(np.arange(len(rows)), counts)


def _entropy(counts: np.ndarray) -> float:
    """Entropy in nats of a distribution given by counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.sum(shares * np.log(1 / shares)))
