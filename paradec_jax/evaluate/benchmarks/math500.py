r"""MATH-500 (Hendrycks et al. 2021, arXiv 2103.03874; the split of Lightman et al. 2023): answers in `\boxed{}`.

What an answer says, and whether it equals the reference, is judged by `math-verify`, an extra: `pip install -e
'.[math]'`. It tries boxed answers first, then other LaTeX and plain numbers, and compares symbolically.
"""

import dataclasses
import os
from typing import Any

from paradec_jax.evaluate.benchmarks.items import Item, Record, Source, check_shots, distinct, read_records

PROMPT = "Problem: {problem}\nSolution:"
STOP = ("Problem:",)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is made of a continuation.

    Attributes:
      equal: whether it equals the reference.
      found: what was read of it, as text, or None.
    """

    equal: bool
    found: str | None


def read(
    path: str | os.PathLike[str], *, shots: int = 0, examples: str | os.PathLike[str] | None = None
) -> Source:
    """Reads objects with "problem" and "answer".

    Args:
      path: the problems.
      shots: solved examples; there are none.
      examples: refused.

    Raises:
      FileNotFoundError, ValueError: a file that cannot be read, or examples.
    """
    check_shots(shots, 0, "math500")
    if examples is not None:
        raise ValueError("math500 has no solved examples: leave --examples out")
    items = [_item(i, row) for i, row in enumerate(read_records(path))]
    return Source(distinct(items))


def _item(number: int, row: Record) -> Item:
    name = row.text("unique_id") if "unique_id" in row.values else f"math500/{number}"
    return Item(name, PROMPT.format(problem=row.text("problem").strip()), STOP, row.text("answer"))


def score(item: Item, text: str) -> Answer:
    """Whether a continuation that was cut at its stop string says the reference.

    Raises:
      ValueError: math-verify is missing.
    """
    parse, verify = _math_verify()
    found = parse(text)
    gold = parse(f"\\boxed{{{item.reference}}}")
    return Answer(bool(verify(gold, found)), str(found[-1]) if found else None)


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ValueError(
            "math500 is judged by math-verify, which is missing: pip install -e '.[math]'"
        ) from None
    return parse, verify
