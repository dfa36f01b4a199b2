"""Judging: exact answers with their uncertainty, drawn texts, and decoders side by side on the same problems."""

from paradec_jax.evaluate.compare import Comparison, compare
from paradec_jax.evaluate.intervals import Paired, paired, ratio, wilson
from paradec_jax.evaluate.judge import Judgement, judge_ids, judge_texts
from paradec_jax.evaluate.ngrams import reverse_perplexity
from paradec_jax.evaluate.text_measures import Variety, self_bleu, variety

__all__ = [
    "Comparison",
    "Judgement",
    "Paired",
    "Variety",
    "compare",
    "judge_ids",
    "judge_texts",
    "paired",
    "ratio",
    "reverse_perplexity",
    "self_bleu",
    "variety",
    "wilson",
]
