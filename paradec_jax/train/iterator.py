"""What a run asks of its data."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DataIterator(Protocol):
    """What `fit` asks of its data; Grain's iterators fulfil it. The state is bytes or what JSON can hold.

    Data that has a `digest` besides, a text or a function, is told apart from other data by it.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...
