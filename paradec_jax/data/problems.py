r"""Problems from files of JSON lines, what is right about an answer, and prompts padded for
decoding.

A line is `{"prompt": "Question: ...", "answer": "...\n#### 73", "steps": 2}`. `answer`, or
`response`, is the text that a model should write; without it there is no right text. `steps`, where
it is given, counts the steps written in the answer. `{"messages": [...]}` is a conversation; its
last message is the answer where it is an assistant's. Other names of these fields are those of
`data.lines`.

A text is right that has the same as the answer by one of `RULES`, which the first answer of a file
chooses.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from paradec_jax.config import TokenSpec
from paradec_jax.data.lines import line_of
from paradec_jax.disk.folders import ASSETS
from paradec_jax.io import AnyPath, json_lines
from paradec_jax.text.tokenizer import Tokenizer

PROMPT = "Question: {question}\nAnswer:\n"  # the form of text that the bundled models know
BUNDLED = "unseen", "tuning"  # word problems of 2 to 8 steps

_NUMBER = re.compile(r"\s*\$?(-?[0-9][0-9,]{0,18})(?![0-9,]|\.[0-9])")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      prompt: text that a model reads before it writes; or messages, which a chat template makes a
        text of.
      solution: text that it should write; None where there is no right one.
      steps: steps written in the solution; None where that is not known.
    """

    prompt: Any
    solution: Any = None
    steps: int | None = None


def extract_answer(text: str) -> int | None:
    """The whole number after the last "####" of a text, or None when a model wrote none there."""
    _, marker, tail = text.rpartition("####")
    number = _NUMBER.match(tail) if marker else None
    return int(number[1].replace(",", "")) if number else None


def extract_boxed(text: str) -> str | None:
    """What stands between the braces of the last \\boxed{...} of a text, or None where none is
    closed.
    """
    _, marker, tail = text.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(tail if marker else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return tail[:i].strip()
    return None


# What of a text is its answer, in words, from the narrowest rule to the one that every text obeys.
RULES: dict[str, Callable[[str], Any]] = {
    'the number after the last "####"': extract_answer,
    "the content of the last \\boxed{}": extract_boxed,
    "the whole text": str.strip,
}


def rule_of(problems: Sequence[Problem]) -> str:
    """The rule that judges answers to problems: the first of `RULES` that the first solution obeys."""
    return next(
        rule for rule, find in RULES.items() if find(problems[0].solution or "") is not None
    )


def exact_answers(problems: Sequence[Problem], texts: Sequence[str]) -> Bool[np.ndarray, "N"]:
    """Which texts have the answers of their problems, all by one rule (`rule_of`)."""
    find = RULES[rule_of(problems)]
    pairs = zip(problems, texts, strict=True)
    return np.asarray([find(text) == find(item.solution or "") for item, text in pairs], bool)


def read_problems(file: AnyPath) -> list[Problem]:
    """Reads problems from a file of JSON lines, or those of the package that are called "unseen" or
    "tuning".

    Raises:
      ValueError: a line that is no such problem or of another form than the first, which the
        message names, or a file without any.
    """
    path = ASSETS / f"{file}.jsonl" if str(file) in BUNDLED else Path(file)
    problems: list[Problem] = []
    passed: Any = set()
    for number, record in json_lines(path):
        where = f"line {number} of {path}"
        try:
            kind, content, answer, names = line_of(record)
            asked = [*content["messages"]] if kind == "messages" else []
            if asked and asked[-1].get("role") == "assistant":
                from paradec_jax.text.chat import joined  # takes in Jinja, which texts do not need

                answer = joined(asked.pop().get("content"))
            if kind != "prompt" and (not asked or answer == ""):
                raise ValueError(
                    f'"{kind}" must begin with a question, and an answer\'s "content" be a text'
                )
            if not isinstance(steps := record.get("steps"), int | None):
                raise ValueError('"steps" must be a whole number')
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        passed |= {*names}
        if asked:
            content = content | {"messages": asked} if len(content) > 1 else asked
        item = Problem(content, answer, steps)
        problems.append(item)
        form, usual = _form(item), _form(problems[0])
        if form != usual:
            raise ValueError(
                f"{where} has {form}, and the first line has {usual}: a file is all of one form"
            )
        if item.solution is not None and RULES[rule := rule_of(problems)](item.solution) is None:
            raise ValueError(f"{where}: the answer lacks {rule}, which the first line has")
    if not problems:
        raise ValueError(f"{path} holds no problem")
    if passed:
        warnings.warn(f"{path}: the fields {sorted(passed)} are passed over", stacklevel=2)
    return problems


def _form(item: Problem) -> str:
    """What a line holds, in words."""
    prompt = "a prompt" if isinstance(item.prompt, str) else "messages"
    return f"{prompt} {'without' if item.solution is None else 'and'} an answer"


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | Problem],
    *,
    spec: TokenSpec,
    bucket: int = 32,
    may_be_empty: bool = False,
) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, " B"]]:
    """Prompts as one bos + ids, padded on the right to P: the longest, rounded up to a multiple of
    `bucket`.

    Args:
      prompts: texts, or problems whose `prompt` is meant; at least one.
      bucket: lengths that share one compiled program.
      may_be_empty: prompts without any token are meant, where the model has no bos either.

    Returns:
      (tokens [B, P], lengths [B]), the lengths counting bos.

    Raises:
      ValueError: when there is no prompt, or a prompt without any token that is not meant.
    """
    if not prompts:
        raise ValueError("need at least one prompt")
    texts = [item.prompt if isinstance(item, Problem) else item for item in prompts]
    rows = [tokenizer.begun(ids, spec.bos) for ids in tokenizer.encode_batch(texts)]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    if lengths.min() == 0 and not may_be_empty:
        raise ValueError(
            f"prompt {int(lengths.argmin())} has no token and the model no bos to start from"
        )
    longest = max(int(lengths.max()), 1)
    tokens = np.full((len(rows), -(-longest // bucket) * bucket), spec.pad, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths
