"""Bytes of tensors in blocks of 16 MiB, each with a digest of its own.

Slices of a tensor are read block by block: a block is checked as a whole, and what a slice wants of it is kept. So
memory holds the slices and one block, however large the tensor is and along whichever axis it is cut.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paradec_jax.disk.folders import StoreError

BLOCK = 16 * 2**20
TAKEN_BY = " (allow_nonfinite)"  # ends the sentence about numbers that are none
ALIGNMENT = 64  # bytes; JAX takes arrays on the host as they lie only if they begin at a multiple of it
Spans = tuple[tuple[int, int], ...]
Check = Callable[[int, np.ndarray], None]


def spans(index: Sequence[slice], shape: Sequence[int]) -> Spans:
    """Begin and end along each axis of slices without steps."""
    return tuple(one.indices(length)[:2] for one, length in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Spans:
    """The spans of everything."""
    return tuple((0, length) for length in shape)


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array that JAX's CPU backend takes without a copy: NumPy's own begin 16 bytes too late for that."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


class Digester:
    """SHA-256 of each block of a tensor's little-endian bytes, which come in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open, self._room = hashlib.sha256(), BLOCK

    def update(self, piece: np.ndarray) -> None:
        """The next bytes."""
        data = piece.reshape(-1).view(np.uint8)
        while data.size:
            if not self._room:
                self._close()
            self._open.update(data[: self._room].data)
            taken = min(self._room, data.size)
            data, self._room = data[taken:], self._room - taken

    def finish(self) -> list[str]:
        """The digests; a tensor without numbers has one."""
        self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open, self._room = hashlib.sha256(), BLOCK


def refuse_nonfinite(path: str, block: np.ndarray) -> None:
    """Refuses numbers that are NaN or infinite. Raises StoreError."""
    if not np.isfinite(block).all():
        raise StoreError(f"parameter {path} holds numbers that are NaN or infinite{TAKEN_BY}")


def differs(path: str) -> StoreError:
    """The error for bytes that are not those of the digests."""
    return StoreError(f"parameter {path} differs from its digests in config.json")


def checking(path: str, recorded: Sequence[str] | None, allow_nonfinite: bool) -> Check:
    """What looks at each block of a parameter: its digest, where there is one, and its numbers.

    Raises, when called:
      StoreError: a block of other bytes, or with numbers that are NaN or infinite.
    """

    def check(number: int, block: np.ndarray) -> None:
        if recorded is not None and hashlib.sha256(block.view(np.uint8).data).hexdigest() != recorded[number]:
            raise differs(path)
        if not allow_nonfinite:
            refuse_nonfinite(path, block)

    return check


def read_slices(
    fill: Callable[[int, memoryview], None],
    shape: Sequence[int],
    stored: Any,
    wanted: Sequence[Spans],
    dtype: Any,
    check: Check,
) -> list[np.ndarray]:
    """Slices of a tensor, from those blocks of it that hold some of them, each read once.

    Args:
      fill: puts the tensor's bytes from a place on into a buffer.
      shape: of the tensor.
      stored: its type.
      wanted: the slices.
      dtype: their type.
      check: is shown each block that is read.
    """
    stored = np.dtype(stored)
    slices = [_Slice(shape, one, dtype) for one in wanted]
    size, step = math.prod(shape), BLOCK // stored.itemsize
    buffer = np.empty(min(size, step), stored)
    for number, begin in enumerate(range(0, max(size, 1), step)):
        block = buffer[: min(step, size - begin)]
        if size and not any(one.wants(begin, begin + block.size) for one in slices):
            continue
        fill(begin * stored.itemsize, block.view(np.uint8).data)
        check(number, block)
        for one in slices:
            one.take(begin, block)
    return [one.array for one in slices]


class _Slice:
    """A slice of a tensor that is filled from blocks.

    The tensor is seen as [rows, columns], split before the last axis that is cut: what a row keeps lies together.
    """

    def __init__(self, shape: Sequence[int], kept: Spans, dtype: Any) -> None:
        self.array = empty([end - begin for begin, end in kept], dtype)
        cut = [i for i, (span, length) in enumerate(zip(kept, shape, strict=True)) if span != (0, length)]
        last = max(cut, default=0)
        inner = math.prod(shape[last + 1 :])
        begin, end = kept[last] if shape else (0, 1)
        self._columns = math.prod(shape[last:])
        self._begin, self._end = begin * inner, end * inner
        numbers = np.arange(math.prod(shape[:last])).reshape(shape[:last])
        self._rows = numbers[tuple(slice(*span) for span in kept[:last])].reshape(-1)
        self._flat = self.array.reshape(self._rows.size, self._end - self._begin)

    def wants(self, begin: int, end: int) -> bool:
        """Whether the tensor's numbers from `begin` to `end` hold some of the slice."""
        return bool(self.array.size) and any(True for _ in self._pieces(begin, end))

    def take(self, begin: int, block: np.ndarray) -> None:
        """Keeps what belongs to the slice of a block that begins at that number of the tensor."""
        if self.array.size:
            for place, first, shape, rows, columns in self._pieces(begin, begin + block.size):
                view = block[first : first + math.prod(shape)].reshape(shape)
                self._flat[place] = view[rows, columns]

    def _pieces(
        self, begin: int, end: int
    ) -> Iterator[tuple[tuple[slice, slice], int, tuple[int, int], Any, slice]]:
        """Where pieces go in the slice; where their rows begin in the block, which shape these have, what is kept."""
        whole_begin, whole_end = -(-begin // self._columns), end // self._columns
        first, last = np.searchsorted(self._rows, (begin // self._columns, -(-end // self._columns)))
        low, high = np.searchsorted(self._rows, (whole_begin, whole_end))
        if low < high:
            numbers = self._rows[low:high] - whole_begin
            together = numbers[-1] - numbers[0] + 1 == numbers.size
            rows = slice(numbers[0], numbers[-1] + 1) if together else numbers
            shape = (whole_end - whole_begin, self._columns)
            place = (slice(low, high), slice(None))
            yield place, whole_begin * self._columns - begin, shape, rows, slice(self._begin, self._end)
        for i in range(first, last):  # at most two more, which the block holds in part
            if low <= i < high:
                continue
            start = int(self._rows[i]) * self._columns + self._begin
            left, right = max(start, begin), min(start - self._begin + self._end, end)
            if left < right:
                place = (slice(i, i + 1), slice(left - start, right - start))
                yield place, left - begin, (1, right - left), slice(None), slice(None)
