r"""Problems with a written solution, from files of JSON lines, their answers, and prompts padded for decoding.

A line is `{"prompt": "Question: ...", "answer": "...\n#### 73", "steps": 2}`. `answer` is the text that a model
should write. A model is right if it writes the same number after the last "####", or the same text where the answer
has no "####". `steps`, where it is given, counts the steps written in the answer.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32

from paradec_jax.config import TokenSpec
from paradec_jax.io import json_lines
from paradec_jax.tokenizer import Tokenizer

PROMPT = "Question: {question}\nAnswer:\n"  # the form of text that the bundled models know
ASSETS = Path(__file__).parents[1] / "assets"
BUNDLED = {"unseen": "unseen.jsonl", "tuning": "tuning.jsonl"}  # word problems of 2 to 8 steps

_NUMBER = re.compile(r"\s*\$?(-?[0-9][0-9,]{0,18})(?![0-9,]|\.[0-9])")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      prompt: what a model reads before it writes.
      solution: what it should write.
      steps: steps written in the solution; None where that is not known.
    """

    prompt: str
    solution: str
    steps: int | None = None

    @property
    def answer(self) -> int | str | None:
        """The number after "####", None where there is none after it, or the whole solution without "####"."""
        return extract_answer(self.solution) if "####" in self.solution else self.solution.strip()

    def answered(self, text: str) -> bool:
        """Whether a text gives the answer."""
        return (text.strip() if isinstance(self.answer, str) else extract_answer(text)) == self.answer


def extract_answer(text: str) -> int | None:
    """The whole number after the last "####" of a text, or None when a model wrote none there."""
    _, marker, tail = text.rpartition("####")
    found = _NUMBER.match(tail) if marker else None
    return int(found[1].replace(",", "")) if found else None


def exact_answers(problems: Sequence[Problem], texts: Sequence[str]) -> Bool[np.ndarray, "N"]:
    """Which texts give the answers of their problems."""
    return np.asarray([item.answered(text) for item, text in zip(problems, texts, strict=True)], bool)


def read_problems(file: str | os.PathLike[str]) -> list[Problem]:
    """Reads problems from a file of JSON lines, or those of the package that are called "unseen" or "tuning".

    Raises:
      ValueError: a line that is no such problem, which the message names, or a file without any.
    """
    path = ASSETS / BUNDLED[str(file)] if str(file) in BUNDLED else Path(file)
    problems = []
    for number, record in json_lines(path, "prompt", "answer"):
        where = f"line {number} of {path}"
        item = Problem(record["prompt"], record["answer"], record.get("steps"))
        if item.answer is None:
            raise ValueError(f'{where}: "answer" has no number after its last "####"')
        if item.steps is not None and type(item.steps) is not int:
            raise ValueError(f'{where}: "steps" must be a whole number')
        problems.append(item)
    if not problems:
        raise ValueError(f"{path} holds no problem")
    return problems


def write_problems(path: str | os.PathLike[str], problems: Iterable[Problem]) -> None:
    """Writes problems as JSON lines."""
    with open(path, "w", encoding="utf-8") as file:
        for item in problems:
            line: dict[str, str | int] = {"prompt": item.prompt, "answer": item.solution}
            line |= {} if item.steps is None else {"steps": item.steps}
            file.write(json.dumps(line) + "\n")


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | Problem],
    *,
    spec: TokenSpec,
    bucket: int = 32,
    may_be_empty: bool = False,
) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, " B"]]:
    """Prompts as one bos + ids, padded on the right to P: the longest, rounded up to a multiple of `bucket`.

    Args:
      tokenizer: the tokenizer of the model.
      prompts: texts, or problems whose `prompt` is meant; at least one.
      spec: special tokens of the model.
      bucket: lengths that share one compiled program.
      may_be_empty: prompts without any token are meant, where the model has no bos either.

    Returns:
      (tokens [B, P], lengths [B]), the lengths counting bos.

    Raises:
      ValueError: when there is no prompt, or a prompt without any token that is not meant.
    """
    if not prompts or bucket < 1:
        raise ValueError(f"need at least one prompt and bucket >= 1, got {len(prompts)} and {bucket}")
    texts = [item.prompt if isinstance(item, Problem) else item for item in prompts]
    rows = [tokenizer.begun(ids, spec.bos) for ids in tokenizer.encode_batch(texts)]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    if lengths.min() == 0 and not may_be_empty:
        raise ValueError(f"prompt {int(lengths.argmin())} has no token and the model no bos to start from")
    longest = max(int(lengths.max()), 1)
    tokens = np.full((len(rows), -(-longest // bucket) * bucket), spec.pad, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths
