"""Tasks whose answers are right or wrong: word problems, generated or read from GSM8K-like files, and pointers."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool

from paradec_jax.data.pointers import PointerProblem, PointerTask, pointer_problem
from paradec_jax.data.word_problems import WordProblem, extract_answer, problem, read_jsonl

__all__ = ["exact_answers", "exact_lists", "pointer_problems", "read_jsonl", "word_problems"]


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
    """Which generations end in the right number, read after their last "####"."""
    pairs = zip(problems, texts, strict=True)
    return np.asarray([extract_answer(text) == item.answer for item, text in pairs], bool)


def pointer_problems(
    count: int, *, seed: int = 0, task: PointerTask | None = None, nearest: int = 0, split: str = "test"
) -> list[PointerProblem]:
    """The first `count` problems of a seed, see `data.pointers`.

    Args:
      count: how many, at least 1.
      seed: of the collection; not negative.
      task: shape of the problems; that of `PointerTask()` when None.
      nearest: fewest look-ups from a query to the end of its chain.
      split: "train", "tune" or "test".

    Raises:
      ValueError: an argument out of range.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count}")
    return [pointer_problem(seed, i, split, task=task, nearest=nearest) for i in range(count)]


def exact_lists(
    problems: Sequence[PointerProblem],
) -> Callable[[Sequence[str], Sequence[str]], Bool[np.ndarray, "N"]]:
    """Judges generations after the prompts of these problems: right are those that name all ends, and no more."""
    solutions = {item.prompt: item.solution for item in problems}

    def score(prompts: Sequence[str], texts: Sequence[str]) -> Bool[np.ndarray, "N"]:
        pairs = zip(prompts, texts, strict=True)
        return np.asarray([solutions[prompt] == text for prompt, text in pairs], bool)

    return score
