"""An n-gram model fitted to samples, and how surprised it is by other texts.

Interpolated Witten-Bell smoothing (Witten and Bell 1991; Chen and Goodman 1999)::

    p(x | h) = (c(h x) + k(h) p(x | h')) / (c(h) + k(h)),     p(x |) from 1 / V for each of V tokens

c counts occurrences, k(h) the different tokens seen after the history h, h' is h without its oldest token. A history
that was never seen gives what its shorter one gives, so that every token has a probability above 0.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from paradec_jax.evaluate.text_measures import Samples

SMOOTHING = "witten-bell"
ORDER = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Ngrams:
    """An n-gram model.

    Attributes:
      order: n; a token is predicted from the n - 1 before it.
      vocab_size: V.
      followers: of each history, how often each token came after it.
      totals: of each history, how often it was followed by any.
    """

    order: int
    vocab_size: int
    followers: Mapping[tuple[int, ...], Mapping[int, int]]
    totals: Mapping[tuple[int, ...], int]

    def probability(self, token: int, history: Sequence[int]) -> float:
        """p(token | history), of which the last `order - 1` tokens count."""
        found = 1 / self.vocab_size
        for length in range(min(self.order - 1, len(history)) + 1):
            key = tuple(history[len(history) - length :])
            seen = self.followers.get(key)
            if seen is None:
                break  # nor was any longer one
            found = (seen.get(token, 0) + len(seen) * found) / (self.totals[key] + len(seen))
        return found

    def perplexity(self, texts: Samples) -> float:
        """`exp(-mean log p)` over all tokens of the texts; a text's first tokens have shorter histories.

        Raises:
          ValueError: no token.
        """
        count = sum(len(text) for text in texts)
        if not count:
            raise ValueError("there is no token to be surprised by")
        return math.exp(
            -math.fsum(
                math.log(self.probability(token, text[max(i - self.order + 1, 0) : i]))
                for text in texts
                for i, token in enumerate(text)
            )
            / count
        )


def fit(samples: Samples, vocab_size: int, order: int = ORDER) -> Ngrams:
    """Counts the n-grams of samples.

    Args:
      samples: token ids.
      vocab_size: V, above all ids.
      order: n.

    Raises:
      ValueError: an order below 1, or a token outside the vocabulary.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, not {order}")
    outside = [token for row in samples for token in row if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token {outside[0]} lies outside a vocabulary of {vocab_size}")
    followers: dict[tuple[int, ...], dict[int, int]] = {}
    totals: dict[tuple[int, ...], int] = {}
    for row in samples:
        for i, token in enumerate(row):
            for length in range(min(order - 1, i) + 1):
                key = tuple(row[i - length : i])
                seen = followers.setdefault(key, {})
                seen[token] = seen.get(token, 0) + 1
                totals[key] = totals.get(key, 0) + 1
    return Ngrams(order, vocab_size, followers, totals)


def reverse_perplexity(samples: Samples, held_out: Samples, vocab_size: int, order: int = ORDER) -> float:
    """Perplexity of held-out texts under an n-gram model that was fitted to the samples.

    Samples that miss part of the language make it large, however good each of them is by itself (Zhao et al. 2018,
    arXiv 1706.04223). It falls with the number of samples: compare equal numbers.

    Args:
      samples, held_out: token ids of one tokenizer.
      vocab_size: V, above all ids.
      order: n.

    Raises:
      ValueError: nothing held out, an order below 1, or a token outside the vocabulary.
    """
    return fit(samples, vocab_size, order).perplexity(held_out)
