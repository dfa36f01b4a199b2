"""Endless iterators over batches that are functions of their index, whole or some of their rows."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from paradec_jax.records import record

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
# from the number of rows to (first, one past the last) of a share
Share = Callable[[int], tuple[int, int]]
_MANY = 2**31 - 1  # batches; a grain dataset has a length


@record
class Part:
    """Some rows of a batch.

    Attributes:
      rows: the arrays of those rows alone.
      first: number of the first of them.
      count: B, rows of the whole batch.
    """

    rows: Batch
    first: int
    count: int


def whole(count: int) -> tuple[int, int]:
    """The share that is all rows."""
    return 0, count


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Draws of a seed for what the numbers name, such as a batch, whatever was drawn before."""
    return np.random.Generator(np.random.Philox([seed % 2**64, *numbers]))


class Maker:
    """Makes batch i, a pure function of its fields and i, whole or some rows of it."""

    def __call__(self, index: int) -> Batch:
        """Batch `index`."""
        return self.part(index, whole).rows

    def part(self, index: int, share: Share) -> Part:
        """The rows of batch `index` that `share` names, made without the others."""
        raise NotImplementedError


class Endless:
    """An endless iterator over make(0), make(1), ...; `get_state` and `set_state` resume it
    exactly.

    Args:
      make: batch i, a pure function of i; `take` asks a `Maker` for parts of it.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.
      digest: digest of what the batches are made from. A state names it, so that a run does not go
        on with another text; None where the maker's fields say all.
    """

    def __init__(
        self, make: Callable[[int], Batch], prefetch: int = 2, digest: str | None = None
    ) -> None:
        self.make: Any = make
        self.digest, self._prefetch = digest, prefetch

    @functools.cached_property
    def _iterator(self) -> Any:
        return _iterate(self.make, self._prefetch)

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> Any:
        """Where it stands; with a digest as JSON values."""
        place = self._iterator.get_state()
        return place if self.digest is None else {"digest": self.digest, "place": place}

    def set_state(self, state: Any) -> None:
        """Goes on from a state.

        Raises:
          ValueError: a state of another digest.
        """
        if self.digest is not None:
            if state["digest"] != self.digest:
                raise ValueError(
                    f"the run was begun with another text, tokenizer or split (digest {state['digest'][:12]}, here "
                    f"{self.digest[:12]}): give the one that it began with, or choose another folder"
                )
            state = state["place"]
        self._iterator.set_state(state)

    def take(self, share: Share) -> None:
        """From now on gives the rows that `share` names as a `Part`; whole batches where the maker
        makes no parts.
        """
        part = getattr(self.make, "part", None)
        if part is not None:
            place = self._iterator.get_state()
            self._iterator = _iterate(lambda index: part(index, share), self._prefetch)
            self._iterator.set_state(place)


def _iterate(make: Callable[[int], Any], prefetch: int) -> "grain.DatasetIterator[Any]":
    import grain  # here, because it takes long and only training reads batches

    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.range(_MANY).map(make).to_iter_dataset(options))
