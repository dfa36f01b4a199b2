"""Generative perplexity: how surprised a causal model is by sampled texts, always beside how varied they are.

With the judge's loss `l_ij = -log p(x_ij | x_i,<j)` of token j of sample i, by name::

    "sdtt"   exp( mean_i mean_j l_ij )                     each sample counts alike
    "mdlm"   exp( sum_ij c_ij l_ij / sum_ij c_ij )         each token counts alike, end-of-text tokens but the first
                                                           of a sample left out (c = 0)

SDTT: Deschenaux and Gulcehre 2024, arXiv 2410.21035; MDLM: Sahoo et al. 2024, arXiv 2406.07524. Both are those of the
released programs, and they differ. SDTT hands a judge of the same vocabulary the ids as they are,
nothing before them, so that the first token has no loss (`begin` changes that). MDLM always goes through the text, as
whoever judges with another vocabulary must. A judge is any model that predicts the next token.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from paradec_jax.evaluate.intervals import bootstrap
from paradec_jax.evaluate.likelihood import Row, token_log_likelihoods
from paradec_jax.evaluate.text_measures import Samples, Variety, variety
from paradec_jax.generate import tokenizer_of
from paradec_jax.store import Model

DEFINITIONS = ("sdtt", "mdlm")


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """What a judge says of N samples.

    Attributes:
      perplexity: generative perplexity.
      interval: its 95% interval, by bootstrap over samples.
      definition: "sdtt" or "mdlm".
      variety: entropies and distinct n-grams of the tokens that the judge read.
      nats: mean loss of the counted tokens of each sample, NaN where there is none, [N].
      counted: tokens whose loss counts, [N].
      cut: samples that were longer than the judge and lost their end.
    """

    perplexity: float
    interval: tuple[float, float]
    definition: str
    variety: Variety
    nats: Float[np.ndarray, "N"]
    counted: Int[np.ndarray, "N"]
    cut: int = 0


def judge_ids(
    judge: Model,
    samples: Samples,
    *,
    definition: str = "sdtt",
    begin: bool = False,
    batch: int = 8,
    seed: int = 0,
) -> Judgement:
    """Judges token ids as they are; the judge must have the vocabulary that they were drawn from.

    Args:
      judge: a model that predicts the next token.
      samples: ids, none above the judge's vocabulary and no sample longer than the judge.
      definition: "sdtt" or "mdlm".
      begin: whether the judge's begin-of-text stands before each sample, so that the first token is judged too; for
        judges that have not seen texts without.
      batch: samples of a call.
      seed: of the judge's initial latent states, where it has any.

    Raises:
      ValueError: an unknown definition, a judge that predicts something else or has no begin-of-text, samples that do
        not fit it, or none with 4 tokens.
    """
    check_judge(judge, definition)
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
    before = _begin(judge) if begin else ()
    rows = [_row(before, row) for row in samples]
    return _judgement(judge, samples, rows, definition, batch, seed)


def judge_texts(
    judge: Model, texts: Sequence[str], *, definition: str = "mdlm", batch: int = 8, seed: int = 0
) -> Judgement:
    """Judges texts, split into tokens by the judge's tokenizer, its begin-of-text before each if it has one.

    What is longer than the judge loses its end, as MDLM does it. Arguments and errors as for `judge_ids`, and a
    judge without a tokenizer.
    """
    check_judge(judge, definition)
    begin = _begin(judge)
    most = judge.network.max_length - len(begin)
    whole = tokenizer_of(judge).encode_batch(texts)
    samples = [row[:most] for row in whole]
    rows = [_row(begin, row) for row in samples]
    cut = sum(len(row) > most for row in whole)
    return dataclasses.replace(_judgement(judge, samples, rows, definition, batch, seed), cut=cut)


def summed(
    losses: Sequence[Float[np.ndarray, "_"]], samples: Samples, definition: str, ends: Sequence[int]
) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """(a, b, tokens that count), [N] each, such that the perplexity is `exp(sum a / sum b)`.

    a and b are 0 of a sample without a token that counts.

    Args:
      losses: nats of the last tokens of each sample: of all, or of all but the first.
      samples: their ids.
      definition: "sdtt" or "mdlm".
      ends: end-of-text tokens.
    """
    total, counted = np.zeros(len(samples)), np.zeros(len(samples), np.int64)
    for i, (loss, row) in enumerate(zip(losses, samples, strict=True)):
        kept = _counted(row, definition, ends)[len(row) - len(loss) :]
        total[i], counted[i] = np.sum(loss[kept], dtype=np.float64), kept.sum()
    if definition == "mdlm":
        return total, counted.astype(np.float64), counted
    return total / np.maximum(counted, 1), np.sign(counted).astype(np.float64), counted


def _counted(row: Sequence[int], definition: str, ends: Sequence[int]) -> np.ndarray:
    """Which tokens of a sample count, were they all predicted."""
    ending = np.isin(np.asarray(row, np.int64), ends)
    first = ending & (np.cumsum(ending) == 1)
    return ~ending | first if definition == "mdlm" else np.ones(len(row), bool)


def _begin(judge: Model) -> tuple[int, ...]:
    """What a text begins with: begin-of-text, or nothing where the judge has none."""
    return () if judge.token_spec.bos is None else (judge.token_spec.bos,)


def _row(begin: Sequence[int], sample: Sequence[int]) -> Row:
    """A sample's row: all its tokens are scored, but for the first where nothing stands before it."""
    ids = (*begin, *sample)
    return Row(ids, len(ids) - 1) if ids else Row((0,), 0)


def check_judge(judge: Model, definition: str) -> None:
    """Refuses an unknown definition, and a model that does not predict the next token. Raises ValueError."""
    if definition not in DEFINITIONS:
        raise ValueError(f"definition must be one of {', '.join(DEFINITIONS)}, not {definition!r}")
    if judge.network.visibility != "causal" or judge.token_spec.alignment != "next":
        raise ValueError("a judge must be a model that predicts the next token from those before it")


def _judgement(
    judge: Model, samples: Samples, rows: Sequence[Row], definition: str, batch: int, seed: int
) -> Judgement:
    found = token_log_likelihoods(judge.network, judge.params, rows, batch=batch, seed=seed)
    losses = [-scores for scores, _ in found]
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
