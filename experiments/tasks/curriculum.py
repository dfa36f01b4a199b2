"""Writes the rows of one phase of a training as JSON lines, which `paradec train` reads.

    python -m experiments.tasks.curriculum words FILE --updates 0 1500 --weights 1 0 0 0 0 0 0
    python -m experiments.tasks.curriculum text FILE --source TEXT --length 256                 a text in pieces
    python -m experiments.tasks.curriculum text FILE --source TEXT --length 256 --windows 8000
    windows from anywhere

Rows of word problems are those of so many batches of 2,048 positions, each of one kind: problems of
2, of 3 and 4, of 5 and 6, of 7 and 8 steps, and practice in sums, steps and recalls. A problem has
a prompt and a response, practice messages, whose assistant says what counts (`start.TEMPLATE`).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from experiments.common.command import run
from experiments.tasks.auxiliary import auxiliary_task
from experiments.tasks.vocabulary import build_tokenizer, token_spec
from experiments.tasks.words import problem
from paradec_jax.data.problems import Problem
from paradec_jax.data.text import documents

BATCH = 2048  # positions
TRIES = 4  # problems that a row may pass over


class Bucket(NamedTuple):
    """Problems of `low` to `high` steps, or practice of a kind, of at most `length` positions."""

    low: int
    high: int
    length: int
    task: str | None = None


# Nine problems of ten fit; with room for the longest, a fifth to a third of a batch would be
# padding.
BUCKETS = (
    Bucket(2, 2, 102),
    Bucket(3, 4, 161),
    Bucket(5, 6, 226),
    Bucket(7, 8, 286),
    Bucket(0, 0, 128, "sums"),
    Bucket(0, 0, 256, "steps"),
    Bucket(0, 0, 128, "recalls"),
)
MOST = BATCH // min(bucket.length for bucket in BUCKETS)  # rows of a batch
tokenizer_of_words = functools.cache(build_tokenizer)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write.

    Attributes:
      task: words, or text.
      file: path of the JSON lines.
      updates: number of the first batch of word problems, and one past the last.
      weights: how often each kind of batch is drawn.
      split: split of the problems.
      source: plain text.
      length: characters of a line.
      windows: lines from anywhere in the text; all of it in pieces by default.
      held_out: whether the lines are of the last tenth of the text, or of what is before it.
      seed: number that fixes what is drawn.
    """

    task: tyro.conf.Positional[Literal["words", "text"]]
    file: tyro.conf.Positional[Path]
    updates: tuple[int, int] = (0, 100)
    weights: tuple[float, ...] = (0.25, 0.4, 0.15, 0.1, 0.05, 0.05, 0.0)
    split: str = "train"
    source: Path | None = None
    length: int = 256
    windows: int | None = None
    held_out: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.weights) != len(BUCKETS) or min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ValueError(
                f"weights must be {len(BUCKETS)} numbers, none negative and one positive, "
                f"not {self.weights}"
            )


def words(options: Options) -> Iterator[dict[str, Any]]:
    """Rows of batches of word problems and practice."""
    for index in range(*options.updates):
        bucket = bucket_of(options, index)
        if bucket.task is None:
            for item in fitting(options, index, bucket):
                yield {"prompt": item.prompt, "response": item.solution}
        else:
            for i in range(BATCH // bucket.length):
                yield {"messages": practice(options.seed, index * MOST + i, bucket)}


def bucket_of(options: Options, index: int) -> Bucket:
    """The bucket of batch `index`, drawn by the weights."""
    draw = np.random.Generator(np.random.Philox([options.seed, index])).random()
    reached = np.cumsum(options.weights) / np.sum(options.weights)
    which = int(np.searchsorted(reached, draw, side="right"))
    return BUCKETS[min(which, int(np.flatnonzero(options.weights)[-1]))]


def fitting(options: Options, index: int, bucket: Bucket) -> list[Problem]:
    """The first problems of batch `index` that fit the bucket; no two batches share a problem's
    number.

    Raises:
      ValueError: most of the problems are too long.
    """
    numbers = range(index * TRIES * MOST, (index + 1) * TRIES * MOST)
    steps = (bucket.low, bucket.high)
    drawn = (problem(options.seed, i, options.split, steps) for i in numbers)
    fits = (item for item in drawn if positions_of(item) <= bucket.length)
    items = list(itertools.islice(fits, BATCH // bucket.length))
    if len(items) < BATCH // bucket.length:
        raise ValueError(f"most problems of {steps} steps do not fit {bucket.length} positions")
    return items


def positions_of(item: Problem) -> int:
    """Positions that a network reads of a problem: all of its tokens but the stop token."""
    tokenizer = tokenizer_of_words()
    prompt = tokenizer.begun(tokenizer.encode(item.prompt), token_spec().bos)
    return len(prompt) + len(tokenizer.encode_after(item.prompt, item.solution))


def practice(seed: int, number: int, bucket: Bucket) -> list[dict[str, str]]:
    """A row of practice up to the bucket's length as messages; the assistant says what counts."""
    assert bucket.task is not None
    tokenizer, item = tokenizer_of_words(), auxiliary_task(seed, number, bucket.task)
    _, offsets = tokenizer.encode_with_offsets(item.answer, item.prompt)
    read = len(tokenizer.begun(tokenizer.encode(item.prompt), token_spec().bos))
    counted = np.zeros(len(item.answer) + 1, bool)
    for low, high in item.spans:
        counted[low:high] = True
    messages = [{"role": "user", "content": item.prompt}] if item.prompt else []
    shown = offsets[: bucket.length + 1 - read]
    for counts, group in itertools.groupby(shown, lambda ends: bool(counted[slice(*ends)].any())):
        places = list(group)
        content = item.answer[places[0][0] : places[-1][1]]
        messages.append({"role": "assistant" if counts else "user", "content": content})
    return messages


def text(options: Options) -> Iterator[dict[str, Any]]:
    """Pieces of a text, or windows of it."""
    if options.source is None:
        raise ValueError("source must be a file of plain text")
    whole = "".join(documents(options.source))
    cut = int(len(whole) * 0.9)
    part = whole[cut:] if options.held_out else whole[:cut]
    starts: Any = range(0, len(part), options.length)
    if options.windows is not None:
        rng = np.random.default_rng(options.seed)
        starts = rng.integers(0, len(part) - options.length + 1, options.windows)
    for start in starts:
        yield {"text": part[start : start + options.length]}


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Draws the rows and writes their file."""
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("w", encoding="utf-8") as file:
        rows = words(options) if options.task == "words" else text(options)
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    run(main)
