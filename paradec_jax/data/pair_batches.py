"""Training batches of noisy and clean blocks from stored trajectories, as a resumable grain pipeline."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from paradec_jax.config.bounds import check_words
from paradec_jax.data.endless import Endless, Part, Share, whole
from paradec_jax.data.noisy_iterates import Example, Selection, pack
from paradec_jax.data.trajectories import Trajectories

Batch = dict[str, np.ndarray]

_PURPOSES = {"order": 0, "mix": 1, "noise": 2}


@dataclasses.dataclass(frozen=True)
class PairBucket:
    """Shape of a batch: prompts of at most `prompt` tokens (P) and at most `pairs` blocks (T)."""

    prompt: int
    pairs: int

    def __post_init__(self) -> None:
        if min(self.prompt, self.pairs) < 1:
            raise ValueError(f"a bucket needs a prompt and pairs of at least 1, not {self}")


@dataclasses.dataclass(frozen=True, eq=False)
class PairBatchMaker:
    """Makes batch i, a pure function of the fields and i. See `pair_batches`."""

    trajectories: Trajectories
    seed: int
    selection: Selection
    batch_tokens: int
    buckets: tuple[PairBucket, ...]
    indices: Int[np.ndarray, " M"]
    unit: str

    def __post_init__(self) -> None:
        check_words(self, unit=("generation", "block"))
        for bucket in self.buckets:
            if self.rows(bucket) < 1:
                raise ValueError(f"batch_tokens {self.batch_tokens} cannot hold a row of {bucket}")
        if not sum(len(items) for items in self.members):
            raise ValueError(f"no trajectory fits into the buckets {self.buckets}")

    def rows(self, bucket: PairBucket) -> int:
        """B, rows of a batch: each is read twice, P + T n positions at a time."""
        return self.batch_tokens // (2 * (bucket.prompt + bucket.pairs * self.trajectories.block_size))

    @functools.cached_property
    def items(self) -> Int[np.ndarray, "items 4"]:
        """(generation, block or -1, prompt tokens, pairs) of everything that a row can be made of."""
        prompts = self.trajectories.prompt_lengths[self.indices]
        counts = self.trajectories.block_counts[self.indices]
        if self.unit == "generation":
            return np.stack([self.indices, np.full_like(self.indices, -1), prompts, counts], axis=1)
        which = np.repeat(np.arange(len(counts)), counts)
        block = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        longer = prompts[which] + block * self.trajectories.block_size
        return np.stack([self.indices[which], block, longer, np.ones_like(block)], axis=1)

    @functools.cached_property
    def members(self) -> list[Int[np.ndarray, " items"]]:
        """Items of each bucket: of those that hold an item, the one with the shortest rows."""
        sizes = np.array(
            [bucket.prompt + bucket.pairs * self.trajectories.block_size for bucket in self.buckets]
        )
        prompts, pairs = np.array([(bucket.prompt, bucket.pairs) for bucket in self.buckets]).T
        fits = (self.items[:, 2:3] <= prompts) & (self.items[:, 3:] <= pairs)
        best = np.where(fits, sizes, sizes.max() + 1).argmin(axis=1)
        return [np.flatnonzero(fits.any(axis=1) & (best == i)) for i in range(len(self.buckets))]

    @functools.cached_property
    def epoch(self) -> int:
        """Batches of an epoch, in which every item is seen at least once."""
        return sum(len(plan) for plan in self._counts)

    @functools.cached_property
    def _counts(self) -> list[range]:
        pairs = zip(self.members, self.buckets, strict=True)
        return [range(-(-len(items) // self.rows(bucket))) for items, bucket in pairs]

    def _rng(self, purpose: str, *numbers: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence([self.seed, _PURPOSES[purpose], *numbers]))
        )

    def plan(self, index: int) -> tuple[PairBucket, Int[np.ndarray, " B"]]:
        """Bucket and items of batch `index`; the last batch of a bucket is filled up from its first."""
        epoch, place = divmod(index, self.epoch)
        order = [(which, part) for which, plan in enumerate(self._counts) for part in plan]
        which, part = order[self._rng("mix", epoch).permutation(len(order))[place]]
        shuffled = self._rng("order", epoch, which).permutation(self.members[which])
        rows = self.rows(self.buckets[which])
        return self.buckets[which], np.take(shuffled, range(part * rows, (part + 1) * rows), mode="wrap")

    def examples(self, index: int, share: Share = whole) -> list[Example]:
        """The examples of batch `index`, or of some of its rows alone."""
        _, items = self.plan(index)
        examples = []
        for row in range(*share(len(items))):
            which, block, _, _ = self.items[items[row]].tolist()
            generation, rng = self.trajectories[which], self._rng("noise", index, row)
            if self.unit == "block":
                examples.append(pack(generation.alone(block), self.selection, rng, first=block))
            else:
                examples.append(pack(generation, self.selection, rng))
        return examples

    def __call__(self, index: int) -> Batch:
        """Batch `index`; see `pair_batches`."""
        return self.part(index, whole).rows

    def part(self, index: int, share: Share) -> Part:
        """Rows of batch `index`."""
        bucket, items = self.plan(index)
        return Part(collate(self.examples(index, share), bucket), share(len(items))[0], len(items))


def collate(examples: Sequence[Example], bucket: PairBucket) -> Batch:
    """Examples as the arrays that the losses read, padded with zeros, which count nowhere.

    Returns:
      {"prompt": int32 [B, P], "prompt_lengths": int32 [B], "noisy", "clean": int32 [B, T, n], "pairs": int32 [B],
      "noisy_real", "clean_real": bool [B, T, n], False at padding}.

    Raises:
      ValueError: no example, or one beyond the bucket.
    """
    if not examples:
        raise ValueError("collate needs at least one example")
    rows, size = len(examples), examples[0].clean.shape[1]
    batch = {
        "prompt": np.zeros((rows, bucket.prompt), np.int32),
        "prompt_lengths": np.asarray([len(example.prompt) for example in examples], np.int32),
        "noisy": np.zeros((rows, bucket.pairs, size), np.int32),
        "clean": np.zeros((rows, bucket.pairs, size), np.int32),
        "pairs": np.asarray([len(example.clean) for example in examples], np.int32),
    }
    for row, example in enumerate(examples):
        if len(example.prompt) > bucket.prompt or len(example.clean) > bucket.pairs:
            raise ValueError(
                f"an example of {len(example.prompt)} prompt tokens and {len(example.clean)} pairs exceeds {bucket}"
            )
        batch["prompt"][row, : len(example.prompt)] = example.prompt
        batch["noisy"][row, : len(example.noisy)] = example.noisy
        batch["clean"][row, : len(example.clean)] = example.clean
    lengths = np.asarray([example.length for example in examples])
    real = np.arange(bucket.pairs * size).reshape(bucket.pairs, size) < lengths[:, None, None]
    return batch | {"noisy_real": real, "clean_real": real}


def pair_batches(
    trajectories: Trajectories,
    *,
    seed: int,
    selection: Selection | None = None,
    batch_tokens: int = 16_384,
    buckets: Sequence[PairBucket] | None = None,
    indices: Sequence[int] | np.ndarray | None = None,
    unit: str = "generation",
    prefetch: int = 2,
) -> Endless:
    """An endless iterator over batches for `consistency_loss`; `get_state` and `set_state` resume it exactly.

    An epoch shuffles the items of each bucket, cuts them into batches, and mixes the batches of all buckets. Noise
    is drawn anew each time. A batch has the arrays of `collate`, B = batch_tokens // (2 (P + T n)) rows.

    Args:
      trajectories: the stored generations.
      seed: non-negative seed; batch i is a pure function of (seed, i) and the other arguments.
      selection: which noisy iterate a block gets; that of the released data by default.
      batch_tokens: positions of a batch, both copies and padding included.
      buckets: the shapes of batches, by default one that holds the longest prompt and the most blocks; what fits none
        of them is left out.
      indices: generations to use, such as those of `kept`; all by default.
      unit: what a row is: a "generation" with all of its blocks, or one "block" after everything before it
        (T = 1, as `cllm_loss` wants it).
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.

    Raises:
      ValueError: when an argument is out of range or nothing fits.
    """
    chosen = np.arange(len(trajectories)) if indices is None else np.asarray(indices, np.int64)
    if len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= len(trajectories):
        raise ValueError(f"indices must name generations from 0 to {len(trajectories) - 1}, at least one")
    if buckets is None:
        prompts, counts = trajectories.prompt_lengths[chosen], trajectories.block_counts[chosen]
        size = trajectories.block_size
        if unit == "block":
            prompts, counts = prompts + (counts - 1) * size, np.ones_like(counts)
        buckets = (PairBucket(int(prompts.max()), int(counts.max())),)
    if not buckets:
        raise ValueError("buckets must hold at least one bucket")
    selection = Selection() if selection is None else selection
    make = PairBatchMaker(trajectories, seed, selection, batch_tokens, tuple(buckets), chosen, unit)
    return Endless(make, prefetch)
