"""Exact answers with their uncertainty, speed, and the table that `paradec compare` prints."""

from paradec_jax.evaluate.compare import Comparison, compare
from paradec_jax.evaluate.intervals import Paired, paired, ratio, wilson
from paradec_jax.evaluate.tasks import (
    exact_answers,
    exact_lists,
    pointer_problems,
    read_jsonl,
    word_problems,
)
from paradec_jax.evaluate.throughput import Case, Speed, measure

__all__ = [
    "Case",
    "Comparison",
    "Paired",
    "Speed",
    "compare",
    "exact_answers",
    "exact_lists",
    "measure",
    "paired",
    "pointer_problems",
    "ratio",
    "read_jsonl",
    "wilson",
    "word_problems",
]
