"""Benchmarks asked as a message to an assistant, and what of its answer is judged.

A code answer counts by its first fenced block, an arithmetic one by its last boxed number, as the authors of Jacobi
Forcing judge theirs; the messages are our own. Solved examples are left out.
"""

import dataclasses
import re
from collections.abc import Callable

from paradec_jax.evaluate.benchmarks.items import Item

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# As LaTeX parts thousands: 1{,}005, 1\,005, 1,\!005.
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})")
_NUMBER = re.compile(r"-?[\d,]*\.?\d+")

HUMANEVAL = (
    "Complete this Python function. Leave the code that is given as it is, and answer with the whole function in one "
    "code block.\n\n```python\n{code}\n```"
)
MBPP = "{task}\n\nAnswer with the Python code in one code block."
MATH = "{problem}\n\nReason step by step and put the final answer into \\boxed{{}}."
GSM8K = "{question}\n\nReason step by step and put the final number into \\boxed{{}}."


@dataclasses.dataclass(frozen=True)
class Instruct:
    """How an assistant is asked, and how its answer becomes the text that the benchmark judges.

    Attributes:
      message: the user's words, from an item without solved examples.
      judged: from the assistant's words, the continuation that `score` or `program` takes.
      max_new_tokens: tokens of an answer unless told otherwise.
    """

    message: Callable[[Item], str]
    judged: Callable[[str], str]
    max_new_tokens: int


def first_code(text: str) -> str:
    """The first fenced block that is Python's or names no language; else the first block; else the whole text."""
    blocks = [(name.lower(), code) for name, code in _FENCE.findall(text)]
    python = [code for name, code in blocks if name in ("python", "py", "python3", "")]
    return [*python, *(code for _, code in blocks), text][0]


def last_boxed(text: str) -> str:
    r"""The text, or "The answer is N." where it has a `\boxed{...}` whose braces balance: the last one counts.

    N is the number in the box, `\boxed{18\text{ dollars}}`, and all that stands there where it holds not just one.
    """
    found = [box for box in map(_balanced, text.split("\\boxed{")[1:]) if box is not None]
    if not found:
        return text
    box = _THOUSANDS.sub("", found[-1]).strip()
    numbers = _NUMBER.findall(box)
    return f"The answer is {numbers[0] if len(numbers) == 1 else box}."


def _balanced(text: str) -> str | None:
    """What stands before the brace that closes an open one; None where none does."""
    depth = 1
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:at]
    return None


def _humaneval_message(item: Item) -> str:
    return HUMANEVAL.format(code=item.prompt.strip())


def _humaneval_judged(text: str) -> str:
    # After the prompt, whose function so far is a docstring alone, the whole function is defined again, with the
    # imports and helpers that the prompt has given.
    return f"\n{first_code(text)}"


def _mbpp_message(item: Item) -> str:
    return MBPP.format(task=item.prompt.removesuffix("\n[BEGIN]\n"))


def _gsm8k_message(item: Item) -> str:
    return GSM8K.format(question=item.prompt.removeprefix("Q: ").removesuffix("\nA:"))


def _math_message(item: Item) -> str:
    return MATH.format(problem=item.prompt.removeprefix("Problem: ").removesuffix("\nSolution:"))


INSTRUCT = {
    "gsm8k": Instruct(_gsm8k_message, last_boxed, 1024),
    "math500": Instruct(_math_message, str, 2048),
    "humaneval": Instruct(_humaneval_message, _humaneval_judged, 1024),
    "mbpp": Instruct(_mbpp_message, first_code, 1024),
}
