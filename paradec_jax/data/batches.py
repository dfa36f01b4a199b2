"""Examples as batches without end: rows of one example in a few lengths, or packed rows.

Which examples share a row is decided once, before the first batch, so that a batch is a function
of its number. Grain reads the batches (`Endless`). Its packers would fill rows from a stream, and
so others in each order of the examples.
"""

import functools
import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from paradec_jax.data.endless import Batch, Endless, Maker, Part, Share, generator
from paradec_jax.data.jsonl import Examples
from paradec_jax.records import record

QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the examples' lengths, which become those of batches
DTYPES: dict[str, type] = {"weights": np.float32, "labelled": np.bool_}  # the others are int32


class Bucket(NamedTuple):
    """Rows of one length.

    Attributes:
      length: T of its batches.
      rows: B of its batches.
      batches: batches of an epoch.
      members: examples of all rows, one row after the other.
      bounds: where each row begins among the members, and the end of the last.
    """

    length: int
    rows: int
    batches: int
    members: Int64[np.ndarray, " N"]
    bounds: Int64[np.ndarray, " R_plus_1"]


@record
class BatchMaker(Maker):
    """Makes batches of which each epoch of `batches` has every example once."""

    examples: Examples
    seed: int
    packed: bool
    buckets: tuple[Bucket, ...]
    block: int | None
    filler: int
    filled: bool

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return sum(bucket.batches for bucket in self.buckets)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """Bucket and rows of each batch of an epoch."""
        rng, plan = generator(self.seed, epoch), []
        for bucket in self.buckets:
            rows = rng.permutation(len(bucket.bounds) - 1)
            plan += [(bucket, some) for some in np.array_split(rows, bucket.batches)]
        return [plan[i] for i in rng.permutation(len(plan))]

    def part(self, index: int, share: Share) -> Part:
        epoch, place = divmod(index, self.batches)
        bucket, rows = self.plan(epoch)[place]
        first, last = share(bucket.rows)
        names = ["tokens", "targets", "weights"] + ["positions", "segments"] * self.packed
        if self.block:
            names = ["tokens", "labelled", "positions"]
        if self.filled:
            names = ["tokens", "labelled", "weights"]
        shape = last - first, bucket.length
        batch: Batch = {name: np.zeros(shape, DTYPES.get(name, np.int32)) for name in names}
        for i, row in enumerate(rows[first:last]):
            at = 0
            low, high = bucket.bounds[row : row + 2]
            for number, example in enumerate(bucket.members[low:high], 1):
                values = self.values(example, bucket.length - at)
                size = len(values["tokens"])
                values |= {"positions": np.arange(size), "segments": number}
                for name in names:
                    batch[name][i, at : at + size] = values[name]
                at += size
        return Part(batch, first, bucket.rows)

    def values(self, example: int, room: int) -> dict[str, Any]:
        """Arrays of one example: with blocks whole and filled, or with its row filled, else its
        tokens and the next ones.
        """
        ids, counted = self.examples[example]
        if self.filled:
            # Where the answer ends must not be seen.
            end = int(np.flatnonzero(counted)[-1]) + 1
            extra = 0, room - end
            tokens = np.pad(ids[:end], extra, constant_values=self.filler)
            labelled = np.pad(counted[:end], extra, constant_values=True)
            return {"tokens": tokens, "labelled": labelled, "weights": labelled / labelled.sum()}
        if self.block is None:
            return {"tokens": ids[:-1], "targets": ids[1:], "weights": counted[1:]}
        extra = 0, min(-len(ids) % self.block, room - len(ids))
        tokens = np.pad(ids, extra, constant_values=self.filler)
        return {"tokens": tokens, "labelled": np.pad(counted, extra, mode="edge")}


def example_batches(
    examples: Examples,
    *,
    seed: int,
    batch_tokens: int,
    length: int,
    packed: bool = False,
    multiple: int = 1,
    block: int | None = None,
    filler: int = 0,
    filled: bool = False,
) -> Endless:
    """Batches without end, of every example once an epoch, in an order drawn for each epoch.

    Bucketed rows hold one example each, in batches of a few lengths. Packed rows hold as many as
    fit, the same ones in every epoch. `Endless.make.batches` is the number of batches of an epoch.

    Args:
      examples: the examples.
      seed: seed of the orders.
      batch_tokens: most positions of a batch, padding included; at least one row.
      length: most positions of a row, T.
      packed: whether rows are packed; batches then have `positions` and `segments` [B, T], which
        count from 1.
      multiple: number that divides the rows of every batch, such as that of devices.
      block: length of blocks; examples are then filled up to the end of their last block, as far as
        rows have room.
      filler: token that does so, and counts where the token before it does: a model learns to end
        its last block.
      filled: whether rows are filled up to their end with tokens that count, after the last token
        of the example that does; the weights of a row sum to 1.

    Returns:
      An iterator over {"tokens", "targets", "weights"} [B, T], with `block` {"tokens", "labelled",
      "positions"}, or with `filled` {"tokens", "labelled", "weights"}; rows that a batch lacks have
      weights 0.
    """
    sizes = np.diff(examples.starts) - (not filled)
    if block is not None:
        sizes = np.minimum(-(-(sizes + 1) // block) * block, length)

    def bucket(length: int, members: np.ndarray, counts: Any) -> Bucket:
        most = max(batch_tokens // length // multiple, 1) * multiple
        batches = -(-len(counts) // most)
        rows = -(-len(counts) // (batches * multiple)) * multiple  # of the fullest batch
        return Bucket(length, rows, batches, members, np.cumsum([0, *counts]))

    if packed:
        rows = pack(sizes, length)
        buckets = [bucket(length, np.concatenate(rows), [len(row) for row in rows])]
    else:
        lengths = bucket_lengths(sizes, length)
        which = np.searchsorted(lengths, sizes)
        groups = [(lengths[i], np.flatnonzero(which == i)) for i in np.unique(which)]
        buckets = [bucket(length, group, np.ones_like(group)) for length, group in groups]
    rules = [examples.digest, seed, batch_tokens, length, packed, multiple]
    rules += [] if block is None and not filled else [block, filler]
    digest = hashlib.sha256(json.dumps(rules).encode()).hexdigest()
    make = BatchMaker(examples, seed, packed, tuple(buckets), block, filler, filled)
    return Endless(make, digest=digest)


def bucket_lengths(sizes: Int64[np.ndarray, " M"], most: int) -> list[int]:
    """A few lengths for rows of these sizes: quantiles, rounded up to multiples of a power of two."""
    unit = max(8, 2 ** (int(sizes.max()).bit_length() - 4))
    ends = np.quantile(sizes, QUANTILES, method="higher")
    return sorted({min(-(-int(end) // unit) * unit, most) for end in ends})


def pack(sizes: Sequence[int] | np.ndarray, length: int) -> list[list[int]]:
    """Numbers of the examples of each row: the longest first, each in the fullest row that has room
    for it.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each row, ascending
    for example in np.argsort(-np.asarray(sizes), kind="stable"):
        size = int(sizes[example])
        place = bisect_left(free, (size, -1))
        room, row = free.pop(place) if place < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(example))
        insort(free, (room - size, row))
    return rows
