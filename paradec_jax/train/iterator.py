"""What a run asks of its data."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DataIterator(Protocol):
    """What `fit` asks of its data; Grain's iterators fulfil it. The state is bytes or what JSON can hold.

    Data that has a `digest` besides, a text or a function, is told apart from other data by it.

    Over several processes every one of them asks for every batch. Data with a method `take` is first given a function
    from B, the rows of a batch, to (first, one past the last) of those that are needed, and may then make a `Part`.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@runtime_checkable
class Part(Protocol):
    """The rows of a batch that a process needs.

    Attributes:
      rows: arrays of those rows alone, by the names of the batch; each has rows on its leading axis.
      first: of them.
      count: B, the rows of the whole batch.
    """

    @property
    def rows(self) -> Mapping[str, Any]: ...
    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
