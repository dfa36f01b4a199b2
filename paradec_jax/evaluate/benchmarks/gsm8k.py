"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): word problems, chain of thought, prompt "Q: ... A:".

The model continues solved examples, each of which ends in "The answer is N.". Two extractions read its answer:

    flexible   the last match of  (-?[$0-9.,]{2,})|(-?[0-9]+)
    strict     the number after "The answer is"

Both compare without case, commas, dollar signs, whatever stands up to "#### ", and a final full stop, as
lm-eval does for its task gsm8k_cot, whose flexible extraction the recurrent-depth papers
(arXiv 2502.05171, 2510.14961) report (there as a chat of several turns; here as plain text).
"""

import dataclasses
import os
import re

from paradec_jax.evaluate.benchmarks.items import Item, Record, Source, check_shots, distinct, read_records

SHOTS = 8
STOP = ("Q:",)
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
STRICT = re.compile(r"The answer is (-?[0-9.,]+)")

_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
_CALCULATOR = re.compile(r"<<.*?>>")

# (question, steps, answer), written for this library.
EXAMPLES = (
    (
        "A tram has 14 riders. At the next stop 6 get off and 9 get on. How many riders are on it then?",
        "After 6 riders get off, 14 - 6 = 8 are left. After 9 get on, there are 8 + 9 = 17.",
        "17",
    ),
    (
        "A baker fills 5 trays with 12 rolls each and burns 7 rolls. How many rolls can she sell?",
        "She fills the trays with 5 * 12 = 60 rolls. Without the burnt ones she has 60 - 7 = 53.",
        "53",
    ),
    (
        "Noor reads 18 pages a day. Her book has 126 pages. In how many days has she read it?",
        "She needs 126 / 18 = 7 days.",
        "7",
    ),
    (
        "A ticket costs $9 and a drink costs $4. What do 3 friends pay who each buy both?",
        "One friend pays 9 + 4 = 13 dollars. Three friends pay 3 * 13 = 39 dollars.",
        "39",
    ),
    (
        "A tank holds 80 litres and is half full. Then 15 litres are drawn. How many litres remain?",
        "Half of the tank is 80 / 2 = 40 litres. Then 40 - 15 = 25 litres remain.",
        "25",
    ),
    (
        "Ivo is 4 years older than Lea, who is twice as old as Max. Max is 11. How old is Ivo?",
        "Lea is 2 * 11 = 22 years old. Ivo is 22 + 4 = 26 years old.",
        "26",
    ),
    (
        "A farmer packs 96 eggs into boxes of 6 and sells every box for $3. How much money does he get?",
        "He packs 96 / 6 = 16 boxes. For them he gets 16 * 3 = 48 dollars.",
        "48",
    ),
    (
        "A rope of 50 metres is cut into 3 pieces of 8 metres and a rest. How long is the rest?",
        "The pieces take 3 * 8 = 24 metres. The rest is 50 - 24 = 26 metres long.",
        "26",
    ),
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What two extractions make of a continuation.

    Attributes:
      flexible, strict: whether each finds the right number.
      found: what the flexible one found, or None.
    """

    flexible: bool
    strict: bool
    found: str | None


def read(
    path: str | os.PathLike[str], *, shots: int = SHOTS, examples: str | os.PathLike[str] | None = None
) -> Source:
    """Reads JSON lines with "question" and "answer", the answer ending in "#### number".

    Args:
      path: the problems.
      shots: solved examples, 0 to 8.
      examples: a file of the same form (the train split) whose first rows are the examples, their calculator
        marks removed; eight written for this library when None.

    Raises:
      FileNotFoundError, ValueError: a file that cannot be read, or too few rows of examples.
    """
    check_shots(shots, SHOTS, "gsm8k")
    solved, told = EXAMPLES[:shots], f"the first {shots} of eight written for this library"
    if examples is not None and shots:
        rows = read_records(examples)[:shots]
        if len(rows) < shots:
            raise ValueError(
                f"{os.fspath(examples)} holds {len(rows)} items, fewer than the {shots} examples"
            )
        solved, told = tuple(_solved(row) for row in rows), f"the first {shots} rows of the file of examples"
    before = "".join(f"Q: {q}\nA: {steps} The answer is {answer}.\n\n" for q, steps, answer in solved)
    items = [
        Item(f"gsm8k/{i}", f"{before}Q: {row.text('question').strip()}\nA:", STOP, _answer(row)[1])
        for i, row in enumerate(read_records(path))
    ]
    return Source(distinct(items), shots, told if shots else "none")


def score(item: Item, text: str) -> Answer:
    """Both extractions of a continuation that was cut at its stop string."""
    numbers = [match.group() for match in FLEXIBLE.finditer(text)]
    found = numbers[-1] if numbers else None
    named = STRICT.search(text)
    right = normalised(item.reference)
    return Answer(
        found is not None and normalised(found) == right,
        named is not None and normalised(named.group(1)) == right,
        found,
    )


def normalised(answer: str) -> str:
    """An answer without what the comparison ignores."""
    for pattern in _IGNORED:
        answer = pattern.sub("", answer)
    return answer.lower()


def _answer(row: Record) -> tuple[str, str]:
    """Steps and number of a reference solution."""
    steps, mark, number = row.text("answer").rpartition("####")
    if not mark or not re.search("[0-9]", number):
        raise ValueError(f'{row.where}: "answer" must end in "#### number"')
    return steps, number.strip()


def _solved(row: Record) -> tuple[str, str, str]:
    steps, number = _answer(row)
    return row.text("question").strip(), " ".join(_CALCULATOR.sub("", steps).split()), number
