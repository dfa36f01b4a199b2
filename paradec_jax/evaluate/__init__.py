"""Judging: exact answers with their uncertainty, and decoders side by side on the same problems."""

from paradec_jax.evaluate.compare import Comparison, compare
from paradec_jax.evaluate.intervals import Paired, paired, ratio, wilson
from paradec_jax.evaluate.tasks import (
    exact_answers,
    exact_lists,
    pointer_problems,
    read_jsonl,
    word_problems,
)

__all__ = [
    "Comparison",
    "Paired",
    "compare",
    "exact_answers",
    "exact_lists",
    "paired",
    "pointer_problems",
    "ratio",
    "read_jsonl",
    "wilson",
    "word_problems",
]
