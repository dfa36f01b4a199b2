"""Measures of sampled texts: entropies, distinct n-grams, self-BLEU, reverse perplexity. Logarithms
are natural.

A judge's perplexity alone rewards texts that repeat themselves, so it is always read beside these.
Entropies and distinct n-grams are those of what was drawn: they depend on how much that is, so
compare equal numbers of samples of equal length.
"""

import dataclasses
import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from paradec_jax.evaluate.entropy import Samples, entropy_of_counts, sample_entropy
from paradec_jax.evaluate.intervals import Z95, ends

SMOOTHING = "witten-bell"
ORDER = 4  # of the n-gram model behind reverse perplexity
NO_SACREBLEU = "self-BLEU needs sacrebleu, which is missing: install paradec-jax[eval]"


def variety(samples: Samples) -> dict[str, Any]:
    """How varied the tokens of samples are, as fields of a row.

    Returns:
      `unigram_entropy` and `fourgram_entropy` (orders 1 and 4 of `entropy`) with their 95%
      intervals by jackknife over samples, `sample_entropy`, and `distinct_1` to `distinct_4`:
      different n-grams over n-grams of all samples together (Li et al. 2016, arXiv 1510.03055).
    """
    fields: dict[str, Any] = {"sample_entropy": sample_entropy(samples)}
    for n, name in ((1, "unigram_entropy"), (2, None), (3, None), (4, "fourgram_entropy")):
        codes, owners = _grams(samples, n)
        fields[f"distinct_{n}"] = int(codes.max() + 1) / len(codes)
        if name is not None:
            measure = functools.partial(_entropy_within, codes, owners)
            fields[name] = measure(np.ones(len(samples), bool))
            fields[f"{name}_interval"] = ends(jackknife(measure, len(samples)))
    return fields


def entropy(samples: Samples, n: int = 1) -> float:
    """Entropy `-sum_g p(g) log p(g)` in nats of the n-grams of all samples together, p their
    shares.
    """
    return entropy_of_counts(np.bincount(_grams(samples, n)[0]))


def self_bleu(texts: Sequence[str]) -> float:
    """Mean over texts of the BLEU of each with all others as references, from 0 to 100: 100 are
    copies.

    The texts are continuations of one prompt (SDTT: Deschenaux and Gulcehre 2024, arXiv 2410.21035,
    eq. 8, which counts to 1), or were drawn without one (Zhu et al. 2018, arXiv 1802.01886). Words
    and punctuation are split by sacrebleu's "13a", case counts, orders above a text's length are
    left out, and zero counts are smoothed by its "exp".
    """
    if len(texts) < 2:
        raise ValueError("self-BLEU needs at least two texts")
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError(NO_SACREBLEU) from error
    bleu = BLEU(effective_order=True)
    others = ([*texts[:i], *texts[i + 1 :]] for i in range(len(texts)))
    scores = [
        bleu.sentence_score(text, rest).score for text, rest in zip(texts, others, strict=True)
    ]
    return math.fsum(scores) / len(scores)


def has_sacrebleu() -> bool:
    """Whether `self_bleu` can be computed."""
    return importlib.util.find_spec("sacrebleu") is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Ngrams:
    """A model of the next token, interpolated with Witten-Bell smoothing (Witten and Bell 1991)::

        p(x | h) = (c(h x) + k(h) p(x | h')) / (c(h) + k(h)),     p(x |) from 1 / V for each of V tokens

    c counts occurrences, k(h) the different tokens seen after the history h, h' is h without its
    oldest token. A history that was never seen gives what its shorter one gives, so that every
    token has a probability above 0.

    Attributes:
      order: n; a token is predicted from the n - 1 before it.
      vocab_size: V.
      followers: how often each token came after each history.
      totals: how often any token came after each history.
    """

    order: int
    vocab_size: int
    followers: dict[tuple[int, ...], Counter[int]]
    totals: dict[tuple[int, ...], int]

    def probability(self, token: int, history: Sequence[int]) -> float:
        """p(token | history), of which the last `order - 1` tokens count."""
        p = 1 / self.vocab_size
        for length in range(min(self.order - 1, len(history)) + 1):
            key = tuple(history[len(history) - length :])
            seen = self.followers.get(key)
            if seen is None:
                break  # nor was any longer one
            p = (seen[token] + len(seen) * p) / (self.totals[key] + len(seen))
        return p

    def perplexity(self, texts: Samples) -> float:
        """`exp(-mean log p)` over all tokens of the texts; a text's first tokens have shorter
        histories.
        """
        nats = [
            -math.log(self.probability(token, text[max(i - self.order + 1, 0) : i]))
            for text in texts
            for i, token in enumerate(text)
        ]
        if not nats:
            raise ValueError("there is no token to be surprised by")
        return math.exp(math.fsum(nats) / len(nats))


def ngrams(samples: Samples, vocab_size: int, order: int = ORDER) -> Ngrams:
    """The model of the samples' n-grams. Raises ValueError for a token outside the vocabulary."""
    followers: dict[tuple[int, ...], Counter[int]] = {}
    for row in samples:
        for i, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} lies outside a vocabulary of {vocab_size}")
            for length in range(min(order - 1, i) + 1):
                followers.setdefault(tuple(row[i - length : i]), Counter())[token] += 1
    totals = {history: seen.total() for history, seen in followers.items()}
    return Ngrams(order, vocab_size, followers, totals)


def reverse_perplexity(
    samples: Samples, held_out: Samples, vocab_size: int, order: int = ORDER
) -> float:
    """Perplexity of held-out texts under an n-gram model of the samples.

    Samples that miss part of the language make it large, however good each of them is by itself
    (Zhao et al. 2018, arXiv 1706.04223). It falls with the number of samples: compare equal
    numbers.
    """
    return ngrams(samples, vocab_size, order).perplexity(held_out)


def _grams(samples: Samples, n: int) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """The number of the kind of each n-gram, kinds counted from 0, and of the sample that it stands
    in.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    rows = [np.asarray(row, np.int64) for row in samples]
    counts = [max(len(row) - n + 1, 0) for row in rows]
    if not sum(counts):
        raise ValueError(f"no sample has {n} token{'s' if n > 1 else ''}")
    windows = [np.lib.stride_tricks.sliding_window_view(row, n) for row in rows if len(row) >= n]
    _, codes = np.unique(np.concatenate(windows), axis=0, return_inverse=True)
    return codes.reshape(-1), np.repeat(np.arange(len(rows)), counts)


def _entropy_within(codes: np.ndarray, owners: np.ndarray, within: np.ndarray) -> float:
    """Entropy of the n-grams in some of the samples, bool [N]."""
    return entropy_of_counts(np.bincount(codes[within[owners]]))


def jackknife(
    measure: Callable[[np.ndarray], float], samples: int, *, groups: int = 20
) -> tuple[float, float]:
    """95% interval of a measure of N independent samples, from its values with each group of them
    left out::

        v -+ z sqrt((G - 1) / G sum_g (v_g - mean v)^2)

    For measures that a bootstrap would bias because it draws samples twice: copies lower an
    entropy, whatever the law. Sample i belongs to group i mod G, and `measure` takes the samples
    that are kept, bool [N].
    """
    if samples < 1 or groups < 2:
        raise ValueError(f"need a sample and at least 2 groups, not {samples} and {groups}")
    everything = np.ones(samples, bool)
    value, groups = measure(everything), min(groups, samples)
    if groups == 1:
        return -math.inf, math.inf
    left = np.asarray([measure(np.arange(samples) % groups != group) for group in range(groups)])
    spread = Z95 * math.sqrt((groups - 1) / groups * float(np.sum((left - left.mean()) ** 2)))
    return value - spread, value + spread
