"""Problems that are drawn from a seed, and who judges their answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.tasks import exact_lists, pointer_problems, word_problems
from experiments.tasks.pointers import PointerTask
from paradec_jax.data.problems import exact_answers


@dataclasses.dataclass(frozen=True)
class Problems:
    """What is asked.

    Attributes:
      prompts: problems, or texts to continue.
      budget: new tokens of an answer; None for room for the longest reference.
      score: which answers are right.
    """

    prompts: Sequence[Any]
    budget: int | None
    score: Any


def of_words(count: int, seed: int, split: str, steps: tuple[int, int] = (2, 4)) -> Problems:
    """Word problems."""
    drawn = word_problems(count, seed=seed, steps=steps, split=split)
    return Problems(drawn, None, exact_answers)


def of_pointers(
    count: int, seed: int, split: str, nearest: int, queries: int = PointerTask().queries
) -> Problems:
    """Tables whose queries are `nearest` look-ups from their end or more; an answer is " =", a name
    for each, and the stop token.
    """
    task = PointerTask(queries=queries)
    items = pointer_problems(count, seed=seed, split=split, task=task, nearest=nearest)
    return Problems([item.prompt for item in items], queries + 2, exact_lists(items))
