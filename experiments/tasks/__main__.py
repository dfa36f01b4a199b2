"""Writes a task as JSON lines, which `paradec compare --data FILE` reads.

The problems of the package are the first two of these:

    python -m experiments.tasks words paradec_jax/assets/unseen.jsonl --count 1000 --seed 1
    python -m experiments.tasks words paradec_jax/assets/tuning.jsonl --count 200 --seed 1 --split
    tune python -m experiments.tasks words easy.jsonl --count 100 --seed 3 --steps 2 4
    python -m experiments.tasks pointers lists.jsonl --count 500
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from experiments.common.command import run
from experiments.tasks.auxiliary import KINDS, auxiliary_task
from experiments.tasks.chains import SYMBOLS, Followers
from experiments.tasks.files import write_problems
from experiments.tasks.pointers import pointer_problems
from experiments.tasks.words import MAX_STEPS, MIN_STEPS, word_problems
from paradec_jax.data.problems import Problem

GIVEN = 8  # symbols of a chain's text that are its prompt


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write.

    Attributes:
      task: words (word problems), pointers, chains, or a kind of practice row.
      file: where to.
      count: how many problems.
      seed: number that fixes what is drawn, at least 0.
      split: of word problems and pointers.
      steps: fewest and most written steps of word problems, from 2 to 8.
    """

    task: tyro.conf.Positional[Literal["words", "pointers", "chains", "sums", "steps", "recalls"]]
    file: tyro.conf.Positional[Path]
    count: int = 200
    seed: int = 0
    split: Literal["train", "tune", "test"] = "test"
    steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS)


def drawn(options: Options) -> list[Problem]:
    """The problems of a task."""
    if options.task == "words":
        return word_problems(
            options.count, seed=options.seed, steps=options.steps, split=options.split
        )
    if options.task == "pointers":
        tables = pointer_problems(options.count, seed=options.seed, split=options.split)
        return [Problem(item.prompt, item.solution) for item in tables]
    if options.task in KINDS:
        rows = [auxiliary_task(options.seed, i, options.task) for i in range(options.count)]
        return [Problem(row.prompt, row.answer) for row in rows]
    texts = [
        "".join(SYMBOLS[i] for i in row) for row in Followers().draw(options.count, options.seed)
    ]
    return [Problem(text[:GIVEN], text[GIVEN:]) for text in texts]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Draws a task and writes its file."""
    write_problems(options.file, drawn(options))


if __name__ == "__main__":
    run(main)
