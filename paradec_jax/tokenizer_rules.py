"""What the rules of a tokenizer.json may cost, read from its JSON before the library sees it.

The library trusts its files: a number too large ends the process, and a regular expression may take time that grows
with a high power of a text's length.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

MOST_SIZE = 2**31 - 1  # of what is counted in int32
MOST_GROWTH = 64  # letters that replacements may make of one
MOST_WORD = 1000  # letters of a word that WordPiece splits
MOST_CHOICES = 10_000  # that repeats with an end leave
MOST_REPEATS = 1  # without an end that what follows may have taken back; the time is of a power one higher
MOST_LETTERS = 10_000  # of a pattern; those of releases have a few hundred
WIDE = 8  # as many lengths make a repeat with an end one without

ATOM = re.compile(r"\\[pPx]\{[^}]*\}|\\.|[^\\()\[|]", re.DOTALL)
GROUP = re.compile(r"\((?:\?(?:<[=!]|<\w+>|#[^)]*|[a-z-]*[:)]|[=!>]))?")
QUANTIFIER = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})([?+]?)")
UNUSUAL = re.compile(r"\\[1-9gk]|\(\?[(~']")  # references, recursion, conditions
AHEAD = ("(?=", "(?!", "(?<=", "(?<!")


def check(fields: dict[str, Any]) -> None:
    """Refuses what would end the process, fill its memory or take for ever.

    Raises:
      ValueError: naming the rule.
    """
    for size in _pad_sizes(fields.get("padding")):
        if size > MOST_SIZE:
            raise ValueError(f"it pads to {size} tokens, more than the {MOST_SIZE} that any model has")
    model = fields.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(word, int) and word > MOST_WORD:  # a word takes their cube
        raise ValueError(f"it reads words of up to {word} letters, more than {MOST_WORD}")
    for part in ("normalizer", "decoder"):
        growth = math.prod(max(1, len(content)) for content in _replacements(fields.get(part)))
        if growth > MOST_GROWTH:
            raise ValueError(f"its {part} makes up to {growth} letters of one, more than {MOST_GROWTH}")
    for _, pattern in rules(fields):
        reason = costly(pattern)
        if reason:
            raise ValueError(f"its pattern {pattern[:60]!r} {reason}")


def rules(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Type and regular expression ("" for none) of every rule but the model's."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for node in _nodes(fields.get(part)):
            pattern = node.get("pattern")
            rule = pattern.get("Regex") if isinstance(pattern, dict) else None
            yield node["type"], rule if isinstance(rule, str) else ""


def _pad_sizes(padding: Any) -> Iterator[int]:
    if isinstance(padding, dict):
        strategy = padding.get("strategy")
        found = [
            *(strategy.values() if isinstance(strategy, dict) else ()),
            padding.get("pad_to_multiple_of"),
        ]
        yield from (size for size in found if isinstance(size, int))


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a part of the file that say what they are, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _replacements(part: Any) -> list[str]:
    """What rules put in the place of others."""
    found = [node.get("content") for node in _nodes(part) if node["type"] == "Replace"]
    return [content for content in found if isinstance(content, str)]


# Regular expressions


@dataclasses.dataclass
class _Cost:
    """What a part of a pattern may do.

    Attributes:
      repeats: its repeats without an end, which match as much as they can and give it back bit by bit.
      degree: those of them that something in the part itself may make give back.
      choices: lengths that its repeats with an end leave.
      empty: whether it may match nothing, and so never fails.
    """

    repeats: int = 0
    degree: int = 0
    choices: int = 1
    empty: bool = True

    def before(self, rest: "_Cost") -> "_Cost":
        """This part and then the rest of its sequence; what may fail after a repeat makes it give back."""
        own = self.degree if rest.empty else self.repeats
        return _Cost(
            self.repeats + rest.repeats,
            own + rest.degree,
            self.choices * rest.choices,
            self.empty and rest.empty,
        )


def costly(pattern: str) -> str | None:
    """Why a regular expression (of Oniguruma) may take too long, or None.

    An expression with repeats X* Y* before something that may fail tries all ways to share the letters between them:
    with d of them n^d at each of n places. Patterns of releases have d = 1 at most. A repeated group with a repeat in
    it counts as two. The sets of letters are not compared, so this is an upper bound.
    """
    if len(pattern) > MOST_LETTERS:
        return f"has {len(pattern)} letters, more than {MOST_LETTERS}"
    if UNUSUAL.search(pattern):
        return "refers back to itself, which no tokenizer needs"
    try:
        cost, end = _alternatives(pattern, 0)
    except RecursionError:
        return "is nested too deep"
    if end < len(pattern):
        return None  # it is no whole pattern: the library says so
    if cost.degree > MOST_REPEATS:
        return f"may take time that grows with the text's length to the power {cost.degree + 1}"
    return "leaves too many choices" if cost.choices > MOST_CHOICES else None


def _alternatives(pattern: str, start: int) -> tuple[_Cost, int]:
    """Cost of what stands between parentheses, and where they end: the worst of its alternatives."""
    worst = None
    while True:
        found, start = _sequence(pattern, start)
        worst = (
            found
            if worst is None
            else _Cost(
                max(worst.repeats, found.repeats),
                max(worst.degree, found.degree),
                max(worst.choices, found.choices),
                worst.empty or found.empty,
            )
        )
        if start >= len(pattern) or pattern[start] != "|":
            return worst, start
        start += 1


def _sequence(pattern: str, start: int) -> tuple[_Cost, int]:
    """Cost of parts after each other, up to the next alternative or the end of the group."""
    parts = []
    while start < len(pattern) and pattern[start] not in "|)":
        part, start = _part(pattern, start)
        while found := QUANTIFIER.match(pattern, start):
            part, start = _repeated(part, found), found.end()
        parts.append(part)
    total = _Cost()
    for part in reversed(parts):
        total = part.before(total)
    return total, start


def _part(pattern: str, start: int) -> tuple[_Cost, int]:
    """Cost of one letter, set or group, and where it ends."""
    if pattern[start] == "[":
        return _Cost(empty=False), _set_end(pattern, start)
    group = GROUP.match(pattern, start)
    if not group:
        atom = ATOM.match(pattern, start)
        return _Cost(empty=False), atom.end() if atom else start + 1
    if group[0].endswith(")") or group[0].startswith("(?#"):  # options, or a comment
        return _Cost(), group.end() + group[0].startswith("(?#")
    inner, end = _alternatives(pattern, group.end())
    if group[0] in AHEAD:
        inner = dataclasses.replace(inner, repeats=0, empty=False)
    if group[0] == "(?>":
        inner = dataclasses.replace(inner, repeats=0)
    return inner, end + 1


def _repeated(part: _Cost, quantifier: re.Match[str]) -> _Cost:
    """Cost of a part that is repeated."""
    sign, least, comma, most, greed = quantifier.groups()
    if sign in "*+?":
        low, high = int(sign == "+"), 1.0 if sign == "?" else math.inf
    else:
        low = int(least or 0)
        high = math.inf if comma and not most else float(most or low)
    repeats, choices = part.repeats, part.choices
    if high - low >= WIDE:
        repeats += 1
    else:
        choices *= int(high - low) + 1
    if high > 1 and part.repeats:  # what comes round again may fail
        repeats += 1
    if sign in "*+?" and greed == "+":
        repeats, choices = 0, 1
    return _Cost(repeats, part.degree, choices, part.empty or low == 0)


def _set_end(pattern: str, start: int) -> int:
    """Where a set of letters ends; sets may stand in sets."""
    depth, at = 0, start
    while at < len(pattern):
        letter = pattern[at]
        if letter == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # as the first letter it stands for itself
        elif letter == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 2 if letter == "\\" else 1
    return at
