"""Arithmetic word problems with written solutions, drawn from a seed, in the form of GSM8K.

A story names the quantities of several people in the order of time. Each relation of the story is
one written step of the solution, and each step is one line that restates the relation and computes
it:

    Question: Ana has 34 apples. Ben has 27 more apples than Ana. Ben buys 12 more apples. How many
      ...?
    Answer:
    Ben has 27 more apples than Ana, so Ben has 34 + 27 = 61 apples.
    Ben buys 12 more apples, so Ben now has 61 + 12 = 73 apples.
    #### 73
"""

import hashlib
from typing import NamedTuple

import numpy as np

from paradec_jax.data.problems import PROMPT, Problem

SPLITS = ("train", "tune", "test")
MIN_STEPS, MAX_STEPS = 2, 8
MAX_VALUE = 99

_NAMES = "Ana Ben Cal Dan Eve Fay Gus Hal Ida Jon Kim Leo Mia Ned Ola Pam Quin Ron Sue Tom Uma Val Will Zoe"
_ITEMS = "apples pears plums lemons nuts eggs cards coins books pens stamps shells beads stones marbles balls"
NAMES, ITEMS = tuple(_NAMES.split()), tuple(_ITEMS.split())


class Relation(NamedTuple):
    """A sentence that fixes one quantity by earlier ones; `operator` joins the two operands of its
    step.

    `updates` says whether the subject held the items before; `factors` are the constants of * and
    /.
    """

    sentence: str
    operator: str
    updates: bool = False
    factors: tuple[int, ...] = ()
    weight: int = 2


TOGETHER = Relation("{subject} has as many {items} as {source} and {other} together", "+", weight=3)
RELATIONS = (
    Relation("{subject} has {amount} more {items} than {source}", "+", weight=4),
    Relation("{subject} has {amount} fewer {items} than {source}", "-", weight=4),
    Relation("{subject} has twice as many {items} as {source}", "*", factors=(2,)),
    Relation("{subject} has {amount} times as many {items} as {source}", "*", factors=(3, 4, 5)),
    Relation("{subject} has half as many {items} as {source}", "/", factors=(2,)),
    TOGETHER,
    Relation("{subject} buys {amount} more {items}", "+", updates=True),
    Relation("{subject} finds {amount} more {items}", "+", updates=True),
    Relation("{subject} loses {amount} {items}", "-", updates=True),
    Relation("{subject} gives away {amount} {items}", "-", updates=True),
    Relation("{subject} gives away half of the {items}", "/", updates=True, factors=(2,)),
)
GIVEN = "{subject} has {amount} {items}."
DISTRACTORS = (
    "{holder} has {amount} {other_items}.",
    "{stranger} has {amount} {items}.",
    "{holder} is {amount} years old.",
    "Each of the {items} costs {amount} cents.",
)
STEP = "{sentence}, so {finding} {left} {operator} {right} = {result} {items}."
ASK_VALUE = "How many {items} does {subject} have?"
ASK_MORE = "How many more {items} does {subject} have than {other}?"
ASK_TOTAL = "How many {items} do {subject} and {other} have together?"
STEP_MORE = "{subject} has more {items} than {other}"
STEP_TOTAL = "{subject} and {other} put their {items} together"
FINDINGS = ("{subject} has", "{subject} now has", "the difference is", "the total is")

_DRAWS = tuple(relation for relation in RELATIONS for _ in range(relation.weight))
_MAX_TOGETHER = 3


def problem(seed: int, index: int, split: str, steps: int | tuple[int, int]) -> Problem:
    """Draws the problem of (seed, index, split, steps), always the same one.

    The split of a question is a hash of its text, and the draw repeats until the hash falls in
    `split`, so splits are disjoint whatever the seed. Two indices may, rarely, draw the same
    question.

    Args:
      seed: non-negative seed of the whole collection.
      index: non-negative number of the problem.
      split: "train" (14 of 16 questions), "tune" or "test" (1 of 16 each).
      steps: written steps, 2 to 8, or an inclusive range to draw from.

    Raises:
      ValueError: when an argument is out of its range.
    """
    low, high = steps if isinstance(steps, tuple) else (steps, steps)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if not MIN_STEPS <= low <= high <= MAX_STEPS:
        raise ValueError(
            f"steps must lie in {MIN_STEPS}..{MAX_STEPS}, low before high, not {steps!r}"
        )
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must not be negative, not {seed} and {index}")
    rng = np.random.Generator(np.random.Philox([seed, SPLITS.index(split), index, low, high]))
    while True:
        story, steps = Story(rng), int(rng.integers(low, high + 1))
        question, solution = story.tell(steps)
        if split_of(question) == split:
            return Problem(PROMPT.format(question=question), solution, steps)


def split_of(question: str) -> str:
    """The split a question belongs to, by a hash of its text."""
    residue = hashlib.blake2b(question.encode(), digest_size=8).digest()[-1] % 16
    return {0: "test", 1: "tune"}.get(residue, "train")


def word_problems(
    count: int,
    *,
    seed: int = 0,
    steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS),
    split: str = "test",
) -> list[Problem]:
    """The first `count` different problems of a seed, at least one; the other arguments are those
    of `problem`.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count}")
    found: dict[str, Problem] = {}
    index = 0
    while len(found) < count:
        drawn = problem(seed, index, split, steps)
        found.setdefault(drawn.prompt, drawn)
        index += 1
    return list(found.values())


class Story:
    """A story while it is told: who holds how many, the sentences so far and the lines of the
    solution.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.names = [NAMES[i] for i in rng.permutation(len(NAMES))]
        first, second = rng.permutation(len(ITEMS))[:2]
        self.items, self.other_items = ITEMS[first], ITEMS[second]
        self.held: dict[str, int] = {}
        self.latest = ""
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.result = 0

    def tell(self, steps: int) -> tuple[str, str]:
        """Tells a story of `steps` written steps and asks its question; returns both, and the
        solution.
        """
        joint = self.rng.random() < 0.4
        givens = 1 + int(self.rng.integers(min(3, steps)))
        together = 0
        self._given()
        for _ in range(steps - joint):
            if givens > 1 and self.rng.random() < 0.6:
                self._given()
                givens -= 1
            together += self._relate(together < _MAX_TOGETHER)
        question = (
            self._ask_joint() if joint else ASK_VALUE.format(items=self.items, subject=self.latest)
        )
        self._distract()
        solution = "\n".join([*self.lines, f"#### {self.result}"])
        return " ".join([*self.sentences, question]), solution

    def practise(self, givens: int, steps: int) -> tuple[str, str]:
        """A story of `givens` quantities and distractors, and a solution of steps that it does not
        tell.
        """
        for _ in range(givens):
            self._given()
        told = list(self.sentences)
        for _ in range(steps):
            self._relate(True)
        self.sentences = told
        self._distract()
        question = ASK_VALUE.format(items=self.items, subject=self.latest)
        return " ".join([*self.sentences, question]), "\n".join(self.lines)

    def _given(self) -> None:
        subject = self.names.pop()
        self.held[subject] = int(self.rng.integers(3, 70))
        self.latest = self.latest or subject
        self.sentences.append(
            GIVEN.format(subject=subject, amount=self.held[subject], items=self.items)
        )

    def _relate(self, allow_together: bool) -> bool:
        """Adds one relation and its step; returns whether it was the one with two sources."""
        while True:
            relation = _DRAWS[self.rng.integers(len(_DRAWS))]
            source = self.latest if self.rng.random() < 0.5 else self._holder()
            other = self._holder()
            if relation is TOGETHER:
                fits = self.held[source] + self.held[other] <= MAX_VALUE
                right = self.held[other] if allow_together and other != source and fits else 0
            else:
                right = self._operand(relation, self.held[source])
            if right:
                break
        subject = source if relation.updates else self.names.pop()
        sentence = relation.sentence.format(
            subject=subject, source=source, other=other, amount=right, items=self.items
        )
        self.sentences.append(sentence + ".")
        finding = FINDINGS[relation.updates].format(subject=subject)
        self.held[subject] = self._write(
            sentence, finding, self.held[source], relation.operator, right
        )
        self.latest = subject
        return relation is TOGETHER

    def _operand(self, relation: Relation, value: int) -> int:
        """Draws the right operand; 0 when every result would leave 2..99 or be no whole number."""
        if relation.factors:
            factor = relation.factors[self.rng.integers(len(relation.factors))]
            fits = (
                value * factor <= MAX_VALUE
                if relation.operator == "*"
                else value % 2 == 0 and value >= 4
            )
            return factor if fits else 0
        most = MAX_VALUE - value if relation.operator == "+" else value - 2
        return int(self.rng.integers(2, most + 1)) if most >= 2 else 0

    def _ask_joint(self) -> str:
        """Asks for a sum or a difference with the latest quantity, one more step; returns the
        question.
        """
        latest = self.held[self.latest]
        totals = [
            name
            for name in self.held
            if name != self.latest and latest + self.held[name] <= MAX_VALUE
        ]
        gaps = [name for name in self.held if abs(latest - self.held[name]) >= 2]
        if not totals and not gaps:
            self._relate(False)
            return ASK_VALUE.format(items=self.items, subject=self.latest)
        total = bool(totals) and (not gaps or self.rng.random() < 0.5)
        candidates = totals if total else gaps
        subject, other = self.latest, candidates[self.rng.integers(len(candidates))]
        if not total and self.held[other] > latest:
            subject, other = other, subject
        names = {"subject": subject, "other": other, "items": self.items}
        sentence = (STEP_TOTAL if total else STEP_MORE).format(**names)
        left, right = self.held[subject], self.held[other]
        self._write(sentence, FINDINGS[3 if total else 2], left, "+" if total else "-", right)
        return (ASK_TOTAL if total else ASK_MORE).format(**names)

    def _write(self, sentence: str, finding: str, left: int, operator: str, right: int) -> int:
        """Writes one line of the solution and returns its result."""
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
        self.result = results[operator]
        self.lines.append(
            STEP.format(
                sentence=sentence,
                finding=finding,
                left=left,
                operator=operator,
                right=right,
                result=self.result,
                items=self.items,
            )
        )
        return self.result

    def _distract(self) -> None:
        """Puts up to two sentences that no step uses anywhere in the story."""
        count = (0, 1, 1, 2)[self.rng.integers(4)]
        for kind in self.rng.permutation(len(DISTRACTORS))[:count]:
            sentence = DISTRACTORS[kind].format(
                holder=self._holder(),
                stranger=self.names[-1],
                amount=int(self.rng.integers(3, 80)),
                items=self.items,
                other_items=self.other_items,
            )
            self.sentences.insert(int(self.rng.integers(len(self.sentences) + 1)), sentence)

    def _holder(self) -> str:
        return list(self.held)[self.rng.integers(len(self.held))]
