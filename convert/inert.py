"""Reads a pickle as data: its opcodes are followed, but no module is imported and nothing that it names is called.

What a pickle would make of foreign classes becomes an `Inert` node, which holds what was to be done. A reader may
give functions of its own for some names ("known").
"""

import dataclasses
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A module and a name in it, as a pickle spells them."""

    module: str
    name: str


class Reference(NamedTuple):
    """What lies outside the pickle, by the value that identifies it (a storage of a tensor, say)."""

    value: Any


@dataclasses.dataclass(eq=False)
class Inert:
    """An object that was not made.

    Attributes:
      made: what was to be called.
      arguments: with what.
      state: what was to be put into it.
      items: keys and values that were to be set in it.
      elements: what was to be appended or added to it.
    """

    made: Any
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = dataclasses.field(default_factory=dict)
    elements: list[Any] = dataclasses.field(default_factory=list)


Known = Mapping[Global, Callable[..., Any]]

# Opcodes that push their own argument.
_PUSHED = """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
"""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARKED: dict[str, Callable[[list[Any]], Any]] = {
    "LIST": list,
    "TUPLE": tuple,
    "FROZENSET": lambda found: frozenset(map(_key, found)),
    "DICT": lambda found: dict(_pairs(found)),
}  # opcodes that make one value of all since the mark
PUSHED = frozenset(_PUSHED.split())
IDLE = frozenset(("PROTO", "FRAME", "STOP"))


def read(data: bytes, known: Known) -> Any:
    """The value that a pickle describes.

    Args:
      data: the pickle.
      known: functions of the reader's own, called with the arguments of a call to that name.

    Raises:
      ValueError: when it is damaged, or uses what only a real unpickler could follow.
    """
    machine = _Machine(known)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.follow(opcode.name, argument)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no whole pickle ({type(error).__name__})") from error
    if len(machine.stack) != 1:
        raise ValueError("it does not end in one value")
    return machine.stack[0]


class _Machine:
    """The stack machine of the pickle format; `marks` holds the stacks that lie below the last mark."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """One opcode."""
        push = self.stack.append
        if name in PUSHED:
            push(argument)
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in EMPTY:
            push(EMPTY[name]())
        elif name in TUPLES:
            push(tuple(self._take(TUPLES[name])))
        elif name in MARKED:
            found = self._since_mark()
            self.stack.append(MARKED[name](found))
        elif name not in IDLE:
            act = getattr(self, f"_do_{name.lower()}", None)
            if act is None:
                raise ValueError(f"its opcode {name} is not followed")
            act(argument)

    def _take(self, count: int) -> list[Any]:
        """The last `count` values, the lowest first."""
        if len(self.stack) < count:
            raise LookupError
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def _since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marks.pop()
        return found

    # Stack and memo

    def _do_mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def _do_pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:  # of an empty stack it takes the mark
            self._since_mark()

    def _do_pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _do_dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _do_put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    _do_binput = _do_long_binput = _do_put

    def _do_memoize(self, _: Any) -> None:
        self._do_put(len(self.memo))

    def _do_get(self, place: int) -> None:
        self.stack.append(self.memo[place])

    _do_binget = _do_long_binget = _do_get

    # Names, references, calls

    def _do_global(self, spelled: str) -> None:
        self.stack.append(Global(*spelled.split(" ", 1)))

    def _do_stack_global(self, _: Any) -> None:
        module, name = self._take(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        self.stack.append(Global(module, name))

    def _do_persid(self, value: str) -> None:
        self.stack.append(Reference(value))

    def _do_binpersid(self, _: Any) -> None:
        self.stack.append(Reference(*self._take(1)))

    def _do_reduce(self, _: Any) -> None:
        called, arguments = self._take(2)
        own = self.known.get(called) if isinstance(called, Global) else None
        self.stack.append(Inert(called, arguments) if own is None else own(*arguments))

    def _do_newobj(self, _: Any) -> None:
        self.stack.append(Inert(*self._take(2)))

    def _do_newobj_ex(self, _: Any) -> None:
        made, arguments, named = self._take(3)
        self.stack.append(Inert(made, (arguments, named)))

    def _do_inst(self, spelled: str) -> None:
        arguments = tuple(self._since_mark())
        self.stack.append(Inert(Global(*spelled.split(" ", 1)), arguments))

    def _do_obj(self, _: Any) -> None:
        made, *arguments = self._since_mark()
        self.stack.append(Inert(made, tuple(arguments)))

    def _do_build(self, _: Any) -> None:
        (state,) = self._take(1)
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state

    # Containers

    def _do_append(self, _: Any) -> None:
        self._extend(self._take(1))

    def _do_appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _do_additems(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, found: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(map(_key, found))
        else:
            (target.elements if isinstance(target, Inert) else target).extend(found)

    def _do_setitem(self, _: Any) -> None:
        self._set(self._take(2))

    def _do_setitems(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, found: list[Any]) -> None:
        target = self.stack[-1]
        (target.items if isinstance(target, Inert) else target).update(_pairs(found))


def _pairs(found: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and values that follow each other."""
    if len(found) % 2:
        raise LookupError
    return list(zip(map(_key, found[::2]), found[1::2], strict=True))


def _key(value: Any) -> Any:
    """What may be a key: a tuple of tuples of itself would take for ever to hash. Raises TypeError."""
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, tuple | frozenset):
            raise TypeError("a key with parts of its own")
    return value
