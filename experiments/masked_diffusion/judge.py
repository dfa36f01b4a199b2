"""Generative perplexity: how surprised a causal model is by sampled texts, always beside how varied
they are.

With the judge's loss `l_ij = -log p(x_ij | x_i,<j)` of token j of sample i, by name::

    "sdtt"   exp( mean_i mean_j l_ij )                     each sample counts alike
    "mdlm"   exp( sum_ij c_ij l_ij / sum_ij c_ij )         each token counts alike, end-of-text tokens but the first
                                                           of a sample left out (c = 0)

SDTT: Deschenaux and Gulcehre 2024, arXiv 2410.21035; MDLM: Sahoo et al. 2024, arXiv 2406.07524;
  both as released.
SDTT hands a judge of the same vocabulary the ids as they are, nothing before them, so that the
first token has no loss (`begin` changes that). MDLM always goes through the text.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.masked_diffusion.text_measures import (
    ORDER,
    SMOOTHING,
    has_sacrebleu,
    reverse_perplexity,
    self_bleu,
    variety,
)
from paradec_jax.evaluate.entropy import Samples
from paradec_jax.evaluate.intervals import bootstrap, ends
from paradec_jax.evaluate.judge import check_judge
from paradec_jax.evaluate.likelihood import Span, log_likelihoods
from paradec_jax.generate import tokenizer_of
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer

DEFINITIONS = ("sdtt", "mdlm")
BLEU_TEXTS = 100  # texts of the group that self-BLEU compares


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """What a judge says of N samples.

    Attributes:
      perplexity: generative perplexity.
      interval: its 95% interval, by bootstrap over samples.
      definition: "sdtt" or "mdlm".
      variety: `variety` of the tokens that the judge read.
      nats: mean loss of the counted tokens of each sample, NaN where there is none, [N].
      counted: tokens whose loss counts, [N].
      cut: samples that were longer than the judge and lost their end.
    """

    perplexity: float
    interval: tuple[float, float]
    definition: str
    variety: dict[str, Any]
    nats: Float[np.ndarray, "N"]
    counted: Int[np.ndarray, "N"]
    cut: int = 0


def judge_ids(
    judge: Model, samples: Samples, *, definition: str = "sdtt", begin: bool = False, batch: int = 8
) -> Judgement:
    """Judges token ids as they are; the judge must have the vocabulary that they were drawn from.

    Args:
      judge: a model that predicts the next token.
      samples: ids, none above the judge's vocabulary and no sample longer than the judge.
      definition: "sdtt" or "mdlm".
      begin: whether the judge's begin-of-text stands before each sample, so that the first token is
        judged too; for judges that have not seen texts without.
      batch: samples of a call.

    Raises:
      ValueError: an unknown definition, a judge that predicts something else or has no
        begin-of-text, samples that do not fit it, or none with 4 tokens.
    """
    check_definition(judge, definition)
    network = judge.network
    for i, row in enumerate(samples):
        if len(row) and max(row) >= network.vocab_size:
            raise ValueError(
                f"sample {i} holds the id {max(row)}, but the judge's vocabulary has {network.vocab_size}: a mask "
                f"that was left, or another vocabulary, whose texts can be judged instead of its ids"
            )
        if len(row) > network.max_length:
            raise ValueError(
                f"sample {i} has {len(row)} tokens, but the judge was built for {network.max_length} positions"
            )
    if begin and judge.token_spec.bos is None:
        raise ValueError("the judge has no begin-of-text token to put before each sample")
    return _judgement(judge, samples, definition, begin, batch)


def judge_texts(
    judge: Model, texts: Sequence[str], *, definition: str = "mdlm", batch: int = 8
) -> Judgement:
    """Judges texts, split into tokens by the judge's tokenizer, its begin-of-text before each if it
    has one.

    What is longer than the judge loses its end, as MDLM does it. Arguments and errors as for
    `judge_ids`, and a judge without a tokenizer.
    """
    check_definition(judge, definition)
    begin = judge.token_spec.bos is not None
    most = judge.network.max_length - begin
    whole = tokenizer_of(judge).encode_batch(texts)
    judged = _judgement(judge, [row[:most] for row in whole], definition, begin, batch)
    return dataclasses.replace(judged, cut=sum(len(row) > most for row in whole))


def summed(
    losses: Sequence[Float[np.ndarray, "_"]], samples: Samples, definition: str, ends: Sequence[int]
) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """(a, b, tokens that count), [N] each, such that the perplexity is `exp(sum a / sum b)`.

    a and b are 0 of a sample without a token that counts.

    Args:
      losses: nats of the last tokens of each sample: of all, or of all but the first.
      ends: end-of-text tokens.
    """
    total, counted = np.zeros(len(samples)), np.zeros(len(samples), np.int64)
    for i, (loss, row) in enumerate(zip(losses, samples, strict=True)):
        ending = np.isin(np.asarray(row, np.int64), ends)
        first = ending & (np.cumsum(ending) == 1)
        counts = ~ending | first if definition == "mdlm" else np.ones(len(row), bool)
        counts = counts[len(row) - len(loss) :]
        total[i], counted[i] = np.sum(loss[counts], dtype=np.float64), counts.sum()
    if definition == "mdlm":
        return total, counted.astype(np.float64), counted
    return total / np.maximum(counted, 1), np.sign(counted).astype(np.float64), counted


def check_definition(judge: Model, definition: str) -> None:
    """Refuses an unknown definition, and a model that is no judge. Raises ValueError."""
    if definition not in DEFINITIONS:
        raise ValueError(f"definition must be one of {', '.join(DEFINITIONS)}, not {definition!r}")
    check_judge(judge)


def _judgement(
    judge: Model, samples: Samples, definition: str, begin: bool, batch: int
) -> Judgement:
    bos = judge.token_spec.bos
    before = (bos,) if begin and bos is not None else ()
    # All tokens of a sample are scored, but for the first where nothing stands before it.
    spans = [Span((*before, *row), 1) if before or len(row) else Span((0,), 1) for row in samples]
    scores = log_likelihoods(judge.network, judge.params, spans, batch=batch)
    losses = [-of for of, _ in scores]
    above, below, counted = summed(losses, samples, definition, judge.token_spec.stop)
    if not counted.any():
        raise ValueError("no sample has a token to be judged")
    low, high = bootstrap(above, below)
    return Judgement(
        math.exp(above.sum() / below.sum()),
        (math.exp(low), math.exp(high)),
        definition,
        variety(samples),
        np.divide(above, below, out=np.full(len(samples), np.nan), where=below > 0),
        counted,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TextJudge:
    """All measures of a row of texts: those of a judge, their variety, and what of real texts they
    miss.

    Attributes:
      judge, judge_name: a model that predicts the next token.
      tokenizer: tokenizer that the ids of the texts belong to.
      vocab_size: ids that a text may hold.
      held_out: ids of real texts, for reverse perplexity.
      batch: samples that the judge reads together.
    """

    judge: Model
    judge_name: str
    tokenizer: Tokenizer
    vocab_size: int
    held_out: Samples
    batch: int

    @property
    def reads_ids(self) -> bool:
        """Whether the judge reads ids as they were drawn: it has the tokenizer that they come from."""
        return self.judge.tokenizer is not None and self.judge.tokenizer.same_as(self.tokenizer)

    def check(self, length: int) -> None:
        """Refuses a model that is no judge, and texts that are too long for it. Raises ValueError."""
        check_judge(self.judge)
        most = self.judge.network.max_length
        if self.reads_ids and length > most:
            raise ValueError(
                f"texts of {length} tokens are longer than the {most} positions of the judge"
            )

    def texts(self, ids: Samples) -> list[str]:
        """Texts without special tokens."""
        return [self.tokenizer.decode(row, skip_special=True) for row in ids]

    def judgement(self, ids: Samples) -> Judgement:
        """What the judge says by SDTT's definition, of ids or of texts without end-of-text."""
        if self.reads_ids:
            begin = self.judge.token_spec.bos is not None
            return judge_ids(self.judge, ids, begin=begin, batch=self.batch)
        texts = [text.strip() for text in self.texts(ids)]
        return judge_texts(self.judge, texts, definition="sdtt", batch=self.batch)

    def measures(self, ids: Samples, judged: Judgement | None = None) -> dict[str, Any]:
        """Fields of a row that need no real texts; `judged` is what `judgement` has said of the
        ids.
        """
        judged = self.judgement(ids) if judged is None else judged
        group = self.texts(ids)[:BLEU_TEXTS]
        bleu = self_bleu(group) if has_sacrebleu() and len(group) > 1 else None
        return {
            "samples": len(ids),
            "tokens": sum(map(len, ids)),
            "judge": self.judge_name,
            "judge_definition": judged.definition,
            "judge_reads": "ids" if self.reads_ids else "texts",
            "judge_begin_of_text": self.judge.token_spec.bos is not None,
            "judge_cut": judged.cut,
            "judge_perplexity": judged.perplexity,
            "interval": ends(judged.interval),
            **judged.variety,
            "self_bleu": bleu,
            "self_bleu_texts": None if bleu is None else len(group),
        }

    def reverse(self, ids: Samples) -> dict[str, Any]:
        """Reverse perplexity of texts, and what it was computed with; None each without real texts."""
        value = reverse_perplexity(ids, self.held_out, self.vocab_size) if self.held_out else None
        return _reverse_fields(value, sum(map(len, ids)))

    def reverse_of_real(self, pieces: Samples) -> dict[str, Any]:
        """Reverse perplexity of real text, one half of its pieces against the other and the other
        way round.
        """
        halves = pieces[::2], pieces[1::2]
        if not halves[1]:
            return _reverse_fields(None, 0)
        nats = 0.0
        for fitted, judged in (halves, halves[::-1]):
            nats += sum(map(len, judged)) * math.log(
                reverse_perplexity(fitted, judged, self.vocab_size)
            )
        tokens = sum(map(len, pieces))
        return _reverse_fields(math.exp(nats / tokens), tokens // 2)


def _reverse_fields(value: float | None, fitted_tokens: int) -> dict[str, Any]:
    model = {"order": ORDER, "smoothing": SMOOTHING, "fitted_tokens": fitted_tokens}
    fields = {f"reverse_{name}": None if value is None else of for name, of in model.items()}
    return {"reverse_perplexity": value} | fields
