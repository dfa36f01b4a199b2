"""Tasks whose answers are right or wrong: word problems, generated or read from GSM8K-like files."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from paradec_jax.data.word_problems import WordProblem, extract_answer, problem, read_jsonl

__all__ = ["exact_answers", "read_jsonl", "word_problems"]


def word_problems(
    count: int, *, seed: int = 0, steps: tuple[int, int] = (2, 8), split: str = "test"
) -> list[WordProblem]:
    """The first `count` different problems of a seed.

    Args:
      count: how many, at least 1.
      seed: of the collection; not negative.
      steps: fewest and most written steps, from 2 to 8.
      split: "train", "tune" or "test".

    Raises:
      ValueError: an argument out of range.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count}")
    found: dict[str, WordProblem] = {}
    index = 0
    while len(found) < count:
        drawn = problem(seed, index, split, steps)
        found.setdefault(drawn.question, drawn)
        index += 1
    return list(found.values())


def exact_answers(problems: Sequence[WordProblem], texts: Sequence[str]) -> Bool[np.ndarray, "N"]:
    """Which generations end in the right number, read behind their last "####"."""
    pairs = zip(problems, texts, strict=True)
    return np.asarray([extract_answer(text) == item.answer for item, text in pairs], bool)
