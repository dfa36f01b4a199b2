"""Training batches of block diffusion: word problems or texts of a chain, each sample filled up to a block's end.

::

    sample       bos prompt | solution stop filler          labelled from | on; a multiple of the block
    packed row   [ sample ][ sample ][ sample ] padding     positions begin anew in each sample, and are 0 in padding

As in SDAR the filler is labelled, so that a model learns to end its last block. Batches are functions of a seed and
their number: {"tokens": int32 [B, T], "labelled": bool [B, T], "positions": int32 [B, T]}.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.tasks.batches import BUCKETS, MIXTURE, Batch, BatchMaker, Bucket, Mixture
from experiments.tasks.chains import MarkovLaw
from paradec_jax.config import TokenSpec
from paradec_jax.data.endless import Endless, Part, Share, whole
from paradec_jax.tokenizer import Tokenizer

TRIES = 4  # samples drawn for each row of one sample, before the bucket counts as too short


class Sample(NamedTuple):
    """Ids of one sample, a multiple of the block, and which of them are labelled."""

    tokens: list[int]
    labelled: list[bool]


def filled(prompt: Sequence[int], answer: Sequence[int], block: int, filler: int) -> Sample:
    """A sample whose answer is labelled, with labelled filler up to the end of its last block."""
    extra = -(len(prompt) + len(answer)) % block
    written = [*answer, *[filler] * extra]
    return Sample([*prompt, *written], [*[False] * len(prompt), *[True] * len(written)])


def pack(samples: Sequence[Sample], rows: int, length: int, pad: int) -> Batch:
    """Rows of samples one after the other: the longest goes first, each into the first row that has room for it.

    What has room nowhere is left out.
    """
    batch = {
        "tokens": np.full((rows, length), pad, np.int32),
        "labelled": np.zeros((rows, length), bool),
        "positions": np.zeros((rows, length), np.int32),
    }
    ends = np.zeros(rows, np.int64)
    for sample in sorted(samples, key=lambda one: -len(one.tokens)):
        size = len(sample.tokens)
        (free,) = np.nonzero(ends + size <= length)
        if not len(free):
            continue
        row, start = free[0], ends[free[0]]
        for name, values in zip(batch, (*sample, range(size)), strict=True):
            batch[name][row, start : start + size] = values
        ends[row] += size
    return batch


@dataclasses.dataclass(frozen=True)
class BlockBatchMaker:
    """Makes batch i, a pure function of the fields and i. See `block_batches`."""

    source: BatchMaker
    block: int
    length: int | None = None

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block}")
        shortest = min(bucket.length for bucket in self.source.buckets)
        if self.block > shortest:
            raise ValueError(
                f"block {self.block} is longer than the rows of a bucket of {shortest} positions"
            )
        longest = max(bucket.length for bucket in self.source.buckets) + self.block
        if self.length is not None and not longest <= self.length <= self.source.batch_tokens:
            raise ValueError(
                f"length of packed rows must be from {longest}, the longest sample, to batch_tokens "
                f"{self.source.batch_tokens}, not {self.length}"
            )

    def sample(self, number: int, bucket: Bucket) -> Sample | None:
        """Sample `number` of a bucket; None where it is too long for it."""
        spec = self.source.spec
        if bucket.task is not None:  # practice is cut, so that it has no end to fill up to
            tokens, labelled = self.source.practice(number, bucket.task)
            most = bucket.length // self.block * self.block
            extra = -len(tokens[:most]) % self.block
            return Sample([*tokens[:most], *[spec.pad] * extra], [*labelled[:most], *[False] * extra])
        prompt, solution = self.source.solved(number, bucket)
        if len(prompt) + len(solution) > bucket.length + 1:
            return None
        return filled(prompt, solution, self.block, spec.pad)

    def __call__(self, index: int) -> Batch:
        """Batch `index`."""
        return self.part(index, whole).rows

    def part(self, index: int, share: Share) -> Part:
        """Rows of batch `index`; samples before them are drawn too, and all where rows are packed."""
        start, tokens, pad = index * self.source.batch_tokens, self.source.batch_tokens, self.source.spec.pad
        if self.length is not None:
            count = tokens // self.length
            batch = pack(list(self._enough(index, start)), count, self.length, pad)
            first, last = share(count)
            return Part({name: rows[first:last] for name, rows in batch.items()}, first, count)
        bucket = self.source.bucket_of(index)
        count, found = tokens // bucket.length, list[Sample]()
        first, last = share(count)
        for number in range(start, start + TRIES * count):
            one = self.sample(number, bucket)
            found += [] if one is None else [one]
            if len(found) == last:
                width = -(-(bucket.length + 1) // self.block) * self.block
                return Part(alone(found[first:], width, pad), first, count)
        raise ValueError(f"most samples of {bucket} do not fit into {bucket.length} positions")

    def _enough(self, index: int, first: int) -> Iterator[Sample]:
        """Samples of the mixture, until they would fill all packed rows."""
        assert self.length is not None
        rng = np.random.Generator(np.random.Philox([self.source.seed, index]))
        room = self.source.batch_tokens // self.length * self.length
        for number in range(first, first + self.source.batch_tokens):
            one = self.sample(number, self.source.draw_bucket(index, rng.random()))
            if one is not None:
                yield one
                room -= len(one.tokens)
            if room <= 0:
                return


def alone(samples: Sequence[Sample], length: int, pad: int) -> Batch:
    """Rows of one sample each, in their order."""
    parts = [pack([sample], 1, length, pad) for sample in samples]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def block_batches(
    tokenizer: Tokenizer,
    *,
    seed: int,
    block: int,
    spec: TokenSpec,
    split: str = "train",
    batch_tokens: int = 16_384,
    buckets: Sequence[Bucket] = BUCKETS,
    mixture: Mixture = MIXTURE,
    length: int | None = None,
    prefetch: int = 2,
) -> Endless:
    """An endless iterator over batches of word problems; `get_state` and `set_state` resume it exactly.

    Args:
      tokenizer: the tokenizer of the model.
      seed: non-negative seed; batch i is a pure function of (seed, i) and the other arguments.
      block: length of a block; of several that a training mixes, a multiple of all.
      spec: special tokens of the model; the filler is its padding.
      split: "train", "tune" or "test".
      batch_tokens: positions of a batch, padding included.
      buckets: kinds of samples; without `length` a batch has one of them, and its rows one sample each, which may be
        a block longer than the bucket. Practice is labelled in its spans and nowhere else.
      mixture: stages (first batch index, weight of each bucket), as in `word_problem_batches`.
      length: of packed rows, which mix the buckets; rows of one sample when None.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.

    Raises:
      ValueError: when an argument is out of range or problems do not fit their bucket.
    """
    stages = tuple((int(start), tuple(float(w) for w in weights)) for start, weights in mixture)
    source = BatchMaker(tokenizer, seed, split, batch_tokens, tuple(buckets), stages, 0.0, spec)
    return Endless(BlockBatchMaker(source, block, length), prefetch)


@dataclasses.dataclass(frozen=True)
class ChainBatchMaker:
    """Makes batch i of texts of a law, a pure function of the fields and i.

    Attributes:
      law: texts are as long as it says; their first `prompt` symbols are not labelled.
      seed: of the texts.
      rows: texts of a batch.
      prompt: symbols that are given.
    """

    law: MarkovLaw
    seed: int
    rows: int
    prompt: int

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 <= self.prompt < self.law.length:
            raise ValueError(
                f"need at least one row, and a prompt shorter than a text of {self.law.length}, not {self.rows} "
                f"and {self.prompt}"
            )

    def __call__(self, index: int) -> Batch:
        """Batch `index`."""
        tokens = self.law.draw(self.rows, [self.seed, index])
        places = np.broadcast_to(np.arange(self.law.length, dtype=np.int32), tokens.shape)
        return {"tokens": tokens, "labelled": places >= self.prompt, "positions": places.copy()}


def chain_batches(law: MarkovLaw, *, seed: int, rows: int, prompt: int, prefetch: int = 2) -> Endless:
    """An endless iterator over texts of a law (`ChainBatchMaker`); `get_state` and `set_state` resume it exactly."""
    return Endless(ChainBatchMaker(law, seed, rows, prompt), prefetch)
