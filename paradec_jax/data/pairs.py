"""Training batches of noisy and clean blocks from stored trajectories.

The noise ratio of an iterate is the share of its block from the first token on that differs from
the fixed point:

    ratio = (n - f) / n,    f = first offset that differs (n if none)

Block j of a generation gets the iterate whose ratio is nearest to `schedule[j mod w]`, so that
noise rises and falls along the sequence (progressive noise; Jacobi Forcing, Hu et al. 2025, arXiv
2512.14681, section 4). The schedule is that of the released data, linspace(0, 1, w); the paper has
{0, 1/w, ..., (w-1)/w}.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from paradec_jax.config import check_number, check_words
from paradec_jax.data.endless import Batch, Endless, Maker, Part, Share, generator
from paradec_jax.data.trajectories import Generation, Trajectories
from paradec_jax.records import choices, record

MAX_TOKENS = 20_480  # longest packed sequence, as released
MAX_RUN = (
    9  # how often one token may stand in a row: CLLM (arXiv 2403.00835) dropped answers with 10
)
ORDER, MIX, NOISE = 0, 1, 2  # purposes of draws
SHAPES = 6  # most shapes of batches, each of which is a program
SAVING = 0.04  # least share of all positions that a further shape saves


def noise_ratio(iterates: Int[np.ndarray, "X n"]) -> Float[np.ndarray, " X"]:
    """Share of each iterate from its first token on that differs from the last iterate."""
    differs = iterates != iterates[-1]
    return np.logical_or.accumulate(differs, axis=1).mean(axis=1)


@choices
class Selection:
    """Chooses a noisy iterate for each block; the defaults are those of the released data.

    Attributes:
      order: "linear" (rising ramp over a window of blocks), "reverse" (falling), "random" (any
        entry of the ramp for each block) or "uniform" (no ramp: any iterate but the last, as CLLM
        does).
      window: w, blocks of a ramp, and its number of entries.
    """

    order: str = "linear"
    window: int = 16

    def __post_init__(self) -> None:
        check_words(self, order=("linear", "reverse", "random", "uniform"))
        check_number("window", self.window)

    def targets(
        self, blocks: int, rng: np.random.Generator, first: int = 0
    ) -> Float[np.ndarray, " T"]:
        """The wanted noise ratio of blocks `first`, `first + 1`, ..."""
        ramp = np.linspace(0, 1, self.window)
        if self.order == "random":
            return ramp[rng.integers(self.window, size=blocks)]
        ramp = ramp[::-1] if self.order == "reverse" else ramp
        return ramp[np.arange(first, first + blocks) % self.window]

    def chosen(
        self, item: Generation, rng: np.random.Generator, first: int = 0
    ) -> Int[np.ndarray, " T"]:
        """Index of the iterate of each block, which the schedule counts from `first` on: the first
        of the nearest.
        """
        if self.order == "uniform":
            return np.asarray(
                [rng.integers(max(len(iterates) - 1, 1)) for iterates in item.iterates]
            )
        pairs = zip(item.iterates, self.targets(len(item.iterates), rng, first), strict=True)
        return np.asarray(
            [np.argmin(np.abs(noise_ratio(iterates) - target)) for iterates, target in pairs]
        )


def worth_training(
    generations: Iterable[Generation], *, stop: tuple[int, ...]
) -> Int[np.ndarray, " M"]:
    """Indices of the generations worth training on, in ascending order.

    A generation is dropped if its packed sequence P + 2 T n is longer than `MAX_TOKENS`, if it
    repeats one token more than `MAX_RUN` times in a row before its first stop token, or if one with
    the same prompt stands before it.
    """
    first: dict[bytes, int] = {}  # index by prompt
    for index, item in enumerate(generations):
        tokens = item.fixed.ravel()
        ends = np.flatnonzero(np.isin(tokens, stop))
        spoken = tokens[: ends[0]] if len(ends) else tokens
        runs = np.diff(np.flatnonzero(np.diff(spoken, prepend=-1, append=-1)))  # tokens of each
        if len(item.prompt) + 2 * len(tokens) <= MAX_TOKENS and runs.max(initial=0) <= MAX_RUN:
            first.setdefault(item.prompt.tobytes(), index)
    return np.asarray([*first.values()], np.int64)


class PairBucket(NamedTuple):
    """Shape of a batch: prompts of at most `prompt` tokens (P) and at most `pairs` blocks (T)."""

    prompt: int
    pairs: int


@record
class PairBatchMaker(Maker):
    """Makes the batches of `pair_batches`."""

    trajectories: Trajectories
    seed: int
    selection: Selection
    batch_tokens: int
    indices: Int[np.ndarray, " M"]
    alone: bool
    multiple: int

    def rows(self, bucket: PairBucket) -> int:
        """B, rows of a batch, at least one: each is read twice, P + T n positions at a time."""
        most = self.batch_tokens // (2 * (bucket.prompt + bucket.pairs * self.trajectories.block))
        return max(most // self.multiple, 1) * self.multiple

    @functools.cached_property
    def items(self) -> Int[np.ndarray, "items 4"]:
        """(generation, block or 0, prompt tokens, pairs) of everything that a row can be made of."""
        prompts = self.trajectories.prompt_lengths[self.indices]
        counts = self.trajectories.block_counts[self.indices]
        if not self.alone:
            return np.stack([self.indices, np.zeros_like(counts), prompts, counts], axis=1)
        which = np.repeat(np.arange(len(counts)), counts)
        block = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        longer = prompts[which] + block * self.trajectories.block
        return np.stack([self.indices[which], block, longer, np.ones_like(block)], axis=1)

    def costs(self, shapes: Int[np.ndarray, "shapes 2"]) -> Float[np.ndarray, "items shapes"]:
        """Positions of a row of each item in each shape; infinite where it has no room."""
        fits = (self.items[:, None, 2:] <= shapes).all(axis=2)
        return np.where(fits, shapes @ [1, 2 * self.trajectories.block], np.inf)

    @functools.cached_property
    def buckets(self) -> tuple[PairBucket, ...]:
        """Shapes of batches: one that holds every item, then, one by one, the one that saves most
        padding.
        """
        deciles = np.linspace(0.1, 1, 10)
        prompts, pairs = np.quantile(self.items[:, 2:], deciles, axis=0, method="higher").T
        shapes = np.unique([(-(-p // 8) * 8, t) for p in prompts for t in pairs], axis=0)
        cost = self.costs(shapes)
        chosen = [len(shapes) - 1]  # the longest prompt and the most pairs
        while len(chosen) < SHAPES:
            # With one more.
            totals = np.minimum(cost[:, chosen].min(axis=1)[:, None], cost).sum(axis=0)
            if totals.min() > (1 - SAVING) * totals[chosen[0]]:
                break
            chosen.append(int(totals.argmin()))
        return tuple(PairBucket(*shapes[i].tolist()) for i in sorted(chosen))

    @functools.cached_property
    def members(self) -> list[Int[np.ndarray, " items"]]:
        """Items of each bucket: of those that hold an item, the one with the shortest rows."""
        best = self.costs(np.asarray(self.buckets)).argmin(axis=1)
        return [np.flatnonzero(best == which) for which in range(len(self.buckets))]

    @functools.cached_property
    def counts(self) -> list[int]:
        """Batches of each bucket in an epoch, in which every item is seen at least once."""
        pairs = zip(self.members, self.buckets, strict=True)
        return [-(-len(items) // self.rows(bucket)) for items, bucket in pairs]

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return sum(self.counts)

    def plan(self, index: int) -> tuple[PairBucket, Int[np.ndarray, " B"]]:
        """Bucket and items of batch `index`; the last batch of a bucket is filled up from its
        first.
        """
        epoch, place = divmod(index, self.batches)
        number = int(generator(self.seed, MIX, epoch).permutation(self.batches)[place])
        which = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        part = number - sum(self.counts[:which])
        shuffled = generator(self.seed, ORDER, epoch, which).permutation(self.members[which])
        rows = self.rows(self.buckets[which])
        places = range(part * rows, (part + 1) * rows)
        return self.buckets[which], np.take(shuffled, places, mode="wrap")

    def part(self, index: int, share: Share) -> Part:
        bucket, items = self.plan(index)
        pairs, rows = [], range(*share(len(items)))
        for row in rows:
            which, block, _, _ = self.items[items[row]].tolist()
            item = self.trajectories[which].alone(block) if self.alone else self.trajectories[which]
            rng = generator(self.seed, NOISE, index, row)
            pairs.append((item, self.selection.chosen(item, rng, block)))
        return Part(collate(pairs, bucket), rows.start, len(items))


def collate(pairs: Sequence[tuple[Generation, Int[np.ndarray, " T"]]], bucket: PairBucket) -> Batch:
    """Generations with the chosen iterates as the arrays that losses read, padded with zeros, which
    count nowhere.

    Returns:
      {"prompt": int32 [B, P], "prompt_lengths": int32 [B], "noisy", "clean": int32 [B, T, n],
      "pairs": int32 [B], "noisy_real", "clean_real": bool [B, T, n], False at padding}.
    """
    rows, size = len(pairs), pairs[0][0].fixed.shape[1]
    blocks = rows, bucket.pairs, size
    batch: Batch = {
        "prompt": np.zeros((rows, bucket.prompt), np.int32),
        "prompt_lengths": np.asarray([len(item.prompt) for item, _ in pairs], np.int32),
        "noisy": np.zeros(blocks, np.int32),
        "clean": np.zeros(blocks, np.int32),
        "pairs": np.asarray([len(item.iterates) for item, _ in pairs], np.int32),
    }
    for row, (item, chosen) in enumerate(pairs):
        batch["prompt"][row, : len(item.prompt)] = item.prompt
        batch["clean"][row, : len(chosen)] = item.fixed
        batch["noisy"][row, : len(chosen)] = [
            x[i] for x, i in zip(item.iterates, chosen, strict=True)
        ]
    lengths = np.asarray([item.length for item, _ in pairs])
    real = np.arange(bucket.pairs * size).reshape(bucket.pairs, size) < lengths[:, None, None]
    return batch | {"noisy_real": real, "clean_real": real}


def pair_batches(
    trajectories: Trajectories,
    *,
    seed: int,
    batch_tokens: int,
    indices: Int[np.ndarray, " M"],
    selection: Selection,
    alone: bool,
    multiple: int,
) -> Endless:
    """An endless iterator over batches for `consistency_loss`; `get_state` and `set_state` resume
    it exactly.

    An epoch shuffles the items of each shape, cuts them into batches, and mixes the batches of all
    shapes. Noise is drawn anew each time. A batch has the arrays of `collate`, B = batch_tokens //
    (2 (P + T n)) rows.

    Args:
      trajectories: the stored generations.
      seed: non-negative seed; batch i is a pure function of (seed, i) and the other arguments.
      batch_tokens: positions of a batch, both copies and padding included.
      indices: generations to use, such as those of `worth_training`, at least one.
      selection: which noisy iterate a block gets.
      alone: whether a row is one block after everything before it (T = 1, as `cllm_loss` wants it)
        instead of a generation with all of its blocks.
      multiple: number that divides the rows of every batch, such as that of devices.

    Raises:
      ValueError: no generation.
    """
    if len(indices) == 0:
        raise ValueError(
            "no answer is left to learn from: each repeats one token too often or is too long"
        )
    return Endless(
        PairBatchMaker(trajectories, seed, selection, batch_tokens, indices, alone, multiple)
    )
