"""LAMBADA from a file: whether a model knows the last word of a passage, and how probable it finds it.

Each line of the file holds {"text": passage} (Paperno et al. 2016; OpenAI's variant, which MDLM and SDTT read). The
word is what stands after the last blank, with that blank::

    begin-of-text   context ...   " word"   end-of-text (seen by models that fill masks alone)

    accuracy        the most probable tokens are exactly the word's
    perplexity      exp(mean over passages of -log p(word)), of a whole word and not of a token

The protocol for models that fill masks is SDTT's (Deschenaux and Gulcehre 2024, arXiv 2410.21035): they are told the
number of the word's tokens, and their perplexity is an upper bound.
"""

import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np

from paradec_jax.evaluate.benchmarks.items import read_records
from paradec_jax.evaluate.bound import Span
from paradec_jax.evaluate.intervals import bootstrap, wilson
from paradec_jax.evaluate.likelihood import prefix
from paradec_jax.evaluate.spans import DRAWS, is_exact, likelihood_kind, score_spans
from paradec_jax.generate import tokenizer_of
from paradec_jax.store import Model


@dataclasses.dataclass(frozen=True)
class LastWords:
    """What `lambada` returns.

    Attributes:
      passages: how many.
      accuracy: share of words that the model would write.
      accuracy_interval: its 95% interval (Wilson).
      perplexity: of a last word.
      perplexity_interval: its 95% interval, by bootstrap over passages.
      likelihood: "exact" or "bound".
      draws: of the bound; None where exact.
      cut: passages that lost their beginning because the model is too short.
    """

    passages: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    perplexity: float
    perplexity_interval: tuple[float, float]
    likelihood: str
    draws: int | None
    cut: int


def read_passages(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Contexts and last words, each word with the blank before it.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that holds no passage of two words; the message names it.
    """
    found = []
    for record in read_records(path):
        context, blank, word = record.text("text").strip().rpartition(" ")
        if not context:
            raise ValueError(f"{record.where}: a passage needs at least two words")
        found.append((context, blank + word))
    return found


def lambada(
    model: Model,
    passages: Sequence[tuple[str, str]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    batch: int = 8,
) -> LastWords:
    """Accuracy and perplexity of the last words of passages.

    Args:
      model: with a tokenizer, and a begin-of-text or a stop token.
      passages: contexts and words, as `read_passages` gives them.
      draws: of a bound, for each passage.
      seed: of draws, and of initial latent states.
      batch: passages of a call.

    Raises:
      ValueError: no passage, no tokenizer, a word longer than the model, or a model without likelihoods.
    """
    if not passages:
        raise ValueError("need at least one passage")
    whole = [passage_span(model, context, word) for context, word in passages]
    spans = [_fitting(span, model.network.max_length) for span in whole]
    scored = score_spans(model, spans, draws=draws, seed=seed, batch=batch)
    nats = np.asarray([of.nats for of in scored])
    right = sum(of.greedy for of in scored)
    low, high = bootstrap(nats)
    return LastWords(
        len(scored),
        right / len(scored),
        wilson(right, len(scored)),
        math.exp(nats.mean()),
        (math.exp(low), math.exp(high)),
        likelihood_kind(model),
        None if is_exact(model) else draws,
        sum(a != b for a, b in zip(whole, spans, strict=True)),
    )


def passage_span(model: Model, context: str, word: str) -> Span:
    """Begin-of-text, context, the word that is scored, and a stop token where the model has one."""
    tokenizer, spec = tokenizer_of(model), model.token_spec
    seen = [prefix(spec), *tokenizer.encode(context)]
    scored = tokenizer.encode(word)
    return Span((*seen, *scored, *spec.stop[:1]), len(seen), len(seen) + len(scored))


def _fitting(span: Span, most: int) -> Span:
    """The span without as many of its first ids as it has beyond `most`."""
    extra = max(len(span.ids) - most, 0)
    if extra > span.start:
        raise ValueError(
            f"a word has {span.stop - span.start} tokens, which does not fit into {most} positions"
        )
    return Span(span.ids[extra:], span.start - extra, span.stop - extra)
