"""Collectives of a compiled program, read from its HLO: how often each kind runs in a call, and on
how many bytes.

A collective in the body of a loop runs once an iteration. The iterations of a loop are what XLA
wrote beside it (`known_trip_count`) or follow from its condition, `i < n` with constants n and
first i, which XLA's loops raise by one; those of any other loop only the data knows, and they count
as the caller says. Of the branches of a conditional the one with most bytes counts.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
_NAMED = re.compile(
    r"(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.-]+)"
)
_KNOWN = re.compile(r'known_trip_count\D*"n":"(\d+)"')
_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")  # hand a number on


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What a call of a program does of one kind.

    Attributes:
      count: how many run.
      bytes: what goes through them on one device: the larger of operand and result of each, so
        whole gathered arrays and whole arrays to be reduced, not what a link carries.
    """

    count: int
    bytes: int


def collectives(text: str, unknown: int = 1) -> dict[str, Collectives]:
    """Collectives of a call by kind, those that do not occur left out.

    Args:
      text: `compiled.as_text()`.
      unknown: iterations of loops whose number only the data knows.
    """
    count, size = Hlo(text).totals(unknown)
    return {kind: Collectives(count[kind], size[kind]) for kind in KINDS if count[kind]}


def unknown_loops(text: str) -> int:
    """Loops of the program, wherever they stand, whose number of iterations only the data knows."""
    program = Hlo(text)
    return sum(program.trips(name, loop) is None for name, loop in program.loops())


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    rest: str  # attributes; of a constant its value, of a parameter its number
    root: bool

    @functools.cached_property
    def bytes(self) -> int:
        return _bytes_of(self.shape)

    @property
    def kind(self) -> str | None:
        """The collective that it is or starts; what ends one counts no more."""
        name = self.op.removesuffix("-start")
        return name if name in KINDS else None


Totals = tuple[Counter[str], Counter[str]]


class Hlo:
    """Computations by name, each a dictionary of instructions by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", {}
        for line in text.splitlines():
            if line.endswith("{") and " = " not in line.partition("(")[0] and "->" in line:
                name = line.removeprefix("ENTRY ").split()[0].split("(")[0].lstrip("%")
                self.entry = name if line.startswith("ENTRY") else self.entry
                current = self.computations[name] = {}
            elif found := _INSTRUCTION.match(line):
                current[found[2]] = _instruction(found, line[found.end() :])

    def loops(self) -> Iterator[tuple[str, Instruction]]:
        """Loops, and the computations in which they stand."""
        for name, inside in self.computations.items():
            yield from ((name, one) for one in inside.values() if one.op == "while")

    def totals(self, unknown: int) -> Totals:
        """How many collectives of each kind a call runs, and their bytes."""
        known: dict[str, Totals] = {}

        def of(name: str) -> Totals:
            if name not in known:
                known[name] = self._own(name, unknown, of)
            return known[name]

        return of(self.entry)

    def _own(self, name: str, unknown: int, of: Callable[[str], Totals]) -> Totals:
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        inside = self.computations[name]
        for one in inside.values():
            if one.kind is not None:
                count[one.kind] += 1
                size[one.kind] += _through(one, inside)
                continue  # what it applies is a sum of two numbers
            called = [part for part in called_by(one) if part in self.computations]
            if not called:
                continue
            times, parts = 1, [of(part) for part in called]
            if one.op == "while":
                trips = self.trips(name, one)
                times = unknown if trips is None else trips
            if one.op == "conditional":
                parts = [max(parts, key=lambda totals: totals[1].total())]
            for own_count, own_size in parts:
                for kind in own_count:
                    count[kind] += times * own_count[kind]
                    size[kind] += times * own_size[kind]
        return count, size

    def trips(self, name: str, loop: Instruction) -> int | None:
        """Iterations of a loop in the computation `name`; None where only the data knows."""
        if found := _KNOWN.search(loop.rest):
            return int(found[1])
        condition = next(
            self.computations[part]
            for kind, part in _NAMED.findall(loop.rest)
            if kind == "condition"
        )
        root = next(one for one in condition.values() if one.root)
        if root.op in ("fusion", "call"):
            outer, parts = root.operands, self.computations[called_by(root)[0]]
            root = next(one for one in parts.values() if one.root)
            names = [_argument(one, parts, outer) for one in root.operands]
        else:
            names = list(root.operands)
        if root.op != "compare" or "direction=LT" not in root.rest or None in names:
            return None
        first, last = (self._number(str(one), condition, name, loop) for one in names)
        return None if first is None or last is None else max(last - first, 0)

    def _number(
        self, wanted: str, condition: dict[str, Instruction], name: str, loop: Instruction
    ) -> int | None:
        """A number in a loop's condition before the first iteration: a constant, or one that the
        loop begins with.
        """
        place, inside = wanted, condition
        for _ in range(len(condition) + len(self.computations[name])):
            one = inside.get(place)
            if one is None:
                return None
            if one.op == "constant":
                return int(one.rest) if re.fullmatch(r"-?\d+", one.rest) else None
            if one.op in _SAME and one.operands:
                place = one.operands[0]
            elif one.op == "get-tuple-element" and inside is condition:
                begin = self.computations[name].get(loop.operands[0])
                found = re.search(r"index=(\d+)", one.rest)
                if begin is None or begin.op != "tuple" or found is None:
                    return None
                place, inside = begin.operands[int(found[1])], self.computations[name]
            else:
                return None
        return None


def _instruction(found: re.Match[str], text: str) -> Instruction:
    shape, text = _balanced(text) if text.startswith("(") else text.split(" ", 1)
    op, _, text = text.lstrip().partition("(")
    inside, rest = _balanced(f"({text}")
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    rest = inside[1:-1] if op in ("constant", "parameter") else rest
    return Instruction(found[2], shape, op, operands, rest, found[1] is not None)


def _balanced(text: str) -> tuple[str, str]:
    """What stands in the parentheses that begin a text, and what follows them."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.end()], text[found.end() :]
    return text, ""


def called_by(one: Instruction) -> list[str]:
    """Computations that an instruction runs."""
    found = [part for _, part in _NAMED.findall(one.rest)]
    for names in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", one.rest):
        found += re.findall(r"%?([\w.-]+)", names)
    return found


def _argument(name: str, inside: dict[str, Instruction], outer: tuple[str, ...]) -> str | None:
    """What a fusion was handed where its root reads `name`."""
    one = inside.get(name)
    while one is not None and one.op in _SAME and one.operands:
        one = inside.get(one.operands[0])
    if one is None or one.op != "parameter":
        return None
    return outer[int(one.rest)]


def _through(one: Instruction, inside: dict[str, Instruction]) -> int:
    """Bytes that go through a collective: the larger of operand and result."""
    given = sum(inside[name].bytes for name in one.operands if name in inside)
    if one.op == "collective-permute-start":
        return given  # its result names the operand too, and flags
    return max(given, one.bytes - (given if one.op == "all-gather-start" else 0))


def _bytes_of(shape: str) -> int:
    total = 0
    for name, sizes in _ARRAY.findall(shape):
        total += math.prod(int(size) for size in sizes.split(",") if size) * _bits(name)
    return total // 8


def _bits(name: str) -> int:
    """Of one number of a type: "bf16", "s32", "f8e4m3fn", "pred"; none of what is no number."""
    if name == "pred":
        return 8
    found = re.search(r"\d+", name)
    return 0 if found is None else int(found[0])
