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
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from experiments.tasks.auxiliary import auxiliary_task
from experiments.tasks.batches import BatchMaker, Bucket
from experiments.tasks.vocabulary import build_tokenizer, token_spec
from paradec_jax.data.text import documents

# Nine problems of ten fit; with room for the longest, a fifth to a third of a batch would be
# padding.
BUCKETS = (
    Bucket(2, 2, 102),
    Bucket(3, 4, 161),
    Bucket(5, 6, 226),
    Bucket(7, 8, 286),
    Bucket(0, 0, 128, task="sums"),
    Bucket(0, 0, 256, task="steps"),
    Bucket(0, 0, 128, task="recalls"),
)


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


def words(options: Options) -> Iterator[dict[str, Any]]:
    """Rows of batches of word problems and practice."""
    spec, mixture = token_spec(), ((0, options.weights),)
    make = BatchMaker(
        build_tokenizer(), options.seed, options.split, 2048, BUCKETS, mixture, 0.0, spec
    )
    stride = make.batch_tokens // min(bucket.length for bucket in BUCKETS)
    for index in range(*options.updates):
        bucket = make.bucket_of(index)
        for item in make.problems(index):
            yield {"prompt": item.prompt, "response": item.solution}
        if bucket.task is not None:
            for i in range(make.batch_tokens // bucket.length):
                yield practice(make, index * stride + i, bucket)


def practice(make: BatchMaker, number: int, bucket: Bucket) -> dict[str, Any]:
    """A row of practice up to the bucket's length, cut into pieces that count and pieces that do
    not.
    """
    assert bucket.task is not None
    item = auxiliary_task(make.seed, number, bucket.task)
    ids, counted = make.practice(number, bucket.task)
    _, offsets = make.tokenizer.encode_with_offsets(item.answer, item.prompt)
    read = len(ids) - len(offsets)
    tokens = zip(offsets[: bucket.length + 1 - read], counted[read:], strict=False)
    messages = [{"role": "user", "content": item.prompt}] if item.prompt else []
    for counts, group in itertools.groupby(tokens, lambda token: token[1]):
        places = [place for place, _ in group]
        content = item.answer[places[0][0] : places[-1][1]]
        messages.append({"role": "assistant" if counts else "user", "content": content})
    return {"messages": messages}


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
        file.writelines(
            json.dumps(row) + "\n" for row in {"words": words, "text": text}[options.task](options)
        )


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
