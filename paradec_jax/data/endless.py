"""Endless iterators over batches that are functions of their index, whole or some of their rows."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
Share = Callable[
    [int], tuple[int, int]
]  # from the rows of a batch to (first, one past the last) of those wanted
_MANY = 2**31 - 1  # batches; a grain dataset has a length


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a batch.

    Attributes:
      rows: the arrays of the batch, of those rows alone.
      first: of them.
      count: B, rows of the whole batch.
    """

    rows: Batch
    first: int
    count: int


def whole(count: int) -> tuple[int, int]:
    """The share of who wants all rows."""
    return 0, count


@runtime_checkable
class MakesParts(Protocol):
    """A maker that can make some rows of a batch without the others, the same as in the whole batch."""

    def part(self, index: int, share: Share) -> Part:
        """The rows of batch `index` that `share` names."""
        ...


class Endless:
    """Iterates over make(0), make(1), ..., or over their parts (`endless`)."""

    def __init__(self, make: Callable[[int], Batch], prefetch: int) -> None:
        self._make, self._prefetch = make, prefetch
        self._iterator = _iterate(make, prefetch)

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> Any:
        """Where it stands."""
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        """Goes on from a state."""
        self._iterator.set_state(state)

    def take(self, share: Share) -> None:
        """From now on gives the rows that `share` names as a `Part`; whole batches where the maker makes no parts."""
        make = self._make
        if isinstance(make, MakesParts):
            place = self.get_state()
            self._iterator = _iterate(lambda index: make.part(index, share), self._prefetch)
            self.set_state(place)


def endless(make: Callable[[int], Batch], prefetch: int) -> Endless:
    """Iterates over make(0), make(1), ...; `get_state` and `set_state` resume it exactly.

    Args:
      make: batch i, a pure function of i.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.
    """
    return Endless(make, prefetch)


def _iterate(make: Callable[[int], Any], prefetch: int) -> "grain.DatasetIterator[Any]":
    import grain  # here, because it takes long and only training reads batches

    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.range(_MANY).map(make).to_iter_dataset(options))
