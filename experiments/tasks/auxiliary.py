"""Practice rows: the skills that a word problem asks for a few times, asked for in every line.

A problem of two steps has 90 tokens, of which four numbers must be looked up or computed. A row of
sums has such a number every eight tokens, a row of recalls and one of steps every six. They are for
training only.
"""

import re
from typing import NamedTuple

import numpy as np

from experiments.tasks.words import ITEMS, NAMES, Story
from paradec_jax.data.problems import PROMPT

KINDS = ("sums", "steps", "recalls")
MAX_STEPS = 14

# What can be known: the result of a sum; in a step the operands as well. The character after a
# number tells where it ends.
_COUNTED = {
    "sums": re.compile(r"(?<== )[0-9]+ ?"),
    "steps": re.compile(r"(?<=[-+*/=] )[0-9]+ ?|[0-9]+ (?=[-+*/] )"),
}


class AuxiliaryTask(NamedTuple):
    """A row: what is read, what is written, and the characters of `answer` that count in a loss."""

    prompt: str
    answer: str
    spans: list[tuple[int, int]]


def auxiliary_task(seed: int, index: int, kind: str) -> AuxiliaryTask:
    """Draws the task of (seed, index, kind), always the same one.

    "sums" are lines `28 + 24 = 52 marbles.` without a story; "steps" are a story of quantities and
    then a long solution whose lines are the relations that a problem would have told before;
    "recalls" tell again and again how many someone has, which now and then changes.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    rng = np.random.Generator(np.random.Philox([seed, index, KINDS.index(kind)]))
    if kind == "recalls":
        return _recalls(rng)
    if kind == "sums":
        items = ITEMS[rng.integers(len(ITEMS))]
        prompt, answer = "", "\n".join(_sum(rng, items) for _ in range(3 * MAX_STEPS))
    else:
        question, answer = Story(rng).practise(int(rng.integers(2, 6)), MAX_STEPS)
        prompt = PROMPT.format(question=question)
    return AuxiliaryTask(
        prompt, answer, [match.span() for match in _COUNTED[kind].finditer(answer)]
    )


def _recalls(rng: np.random.Generator) -> AuxiliaryTask:
    """`Ana has 34 nuts. Ben has 5 nuts. Ana has 34 nuts. Ben now has 71 nuts. ...`; what was told
    before counts.
    """
    items = ITEMS[rng.integers(len(ITEMS))]
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[: int(rng.integers(3, 11))]]
    held: dict[str, int] = {}
    answer = ""
    spans = []
    for _ in range(4 * MAX_STEPS):
        name = people[rng.integers(len(people))]
        known = name in held
        changes = known and rng.random() < 0.12
        if not known or changes:
            held[name] = int(rng.integers(2, 100))
        answer += f"{name} now has " if changes else f"{name} has "
        if known and not changes:
            spans.append((len(answer), len(answer) + len(str(held[name])) + 1))
        answer += f"{held[name]} {items}. "
    return AuxiliaryTask("", answer.rstrip(), spans)


def _sum(rng: np.random.Generator, items: str) -> str:
    """One line of arithmetic with operands and a result of 2 to 99."""
    kind = "++--*/"[rng.integers(6)]
    if kind == "+":
        left = int(rng.integers(2, 98))
        right = int(rng.integers(2, 100 - left))
        return f"{left} + {right} = {left + right} {items}."
    if kind == "-":
        left = int(rng.integers(4, 100))
        right = int(rng.integers(2, left - 1))
        return f"{left} - {right} = {left - right} {items}."
    if kind == "*":
        right = int(rng.integers(2, 6))
        left = int(rng.integers(2, 99 // right + 1))
        return f"{left} * {right} = {left * right} {items}."
    left = 2 * int(rng.integers(2, 50))
    return f"{left} / 2 = {left // 2} {items}."
