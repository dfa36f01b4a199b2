"""Training batches of word problems as a resumable grain pipeline."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.tasks.auxiliary import auxiliary_task
from experiments.tasks.vocabulary import token_spec
from experiments.tasks.words import problem
from paradec_jax.config import TokenSpec
from paradec_jax.data.endless import Endless, Part, Share, whole
from paradec_jax.data.problems import Problem
from paradec_jax.text.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
Mixture = tuple[tuple[int, tuple[float, ...]], ...]

_LENGTH_SAMPLE = 32
_TRIES = 4  # problems that a row may pass over before the bucket counts as too short


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Problems of `steps_low` to `steps_high` steps, padded to `length` positions (T of the batch).

    Problems that need more positions are passed over; at least half of them must fit. With a
    `task`, the rows are practice of that kind (`auxiliary.KINDS`), cut at `length`, and the numbers
    of steps mean nothing.
    """

    steps_low: int
    steps_high: int
    length: int
    task: str | None = None


# The lengths hold every problem that the templates can make, not only those seen.
BUCKETS = (Bucket(2, 3, 164), Bucket(4, 5, 228), Bucket(6, 8, 328))
MIXTURE = ((0, (0.4, 0.3, 0.3)),)


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Makes batch i, a pure function of the fields and i. See `word_problem_batches`."""

    tokenizer: Tokenizer
    seed: int
    split: str
    batch_tokens: int
    buckets: tuple[Bucket, ...]
    mixture: tuple[tuple[int, tuple[float, ...]], ...]
    prompt_weight: float
    spec: TokenSpec

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("buckets must hold at least one bucket")
        if not self.spec.stop:
            raise ValueError("spec must name a stop token: every row ends in one")
        _check_mixture(self.mixture, len(self.buckets))
        for bucket in self.buckets:
            if bucket.length > self.batch_tokens:
                raise ValueError(
                    f"batch_tokens {self.batch_tokens} cannot hold a row of {bucket.length}"
                )
            if bucket.task is not None:
                auxiliary_task(self.seed, 0, bucket.task)
                continue
            steps = (bucket.steps_low, bucket.steps_high)
            sample = self._ids(
                [problem(self.seed, i, self.split, steps) for i in range(_LENGTH_SAMPLE)]
            )
            lengths = sorted(len(prompt) + len(solution) - 1 for prompt, solution in sample)
            if lengths[_LENGTH_SAMPLE // 2] > bucket.length:
                raise ValueError(
                    f"a problem of {steps[0]} to {steps[1]} steps needs {lengths[_LENGTH_SAMPLE // 2]} positions "
                    f"and its bucket has length {bucket.length}: give the bucket a greater length"
                )

    def bucket_of(self, index: int) -> Bucket:
        """The bucket of batch `index`: a draw from the stage of the mixture that `index` falls in."""
        draw = np.random.Generator(np.random.Philox([self.seed, index])).random()
        return self.draw_bucket(index, draw)

    def draw_bucket(self, index: int, draw: float) -> Bucket:
        """The bucket that a number in [0, 1) draws from the mixture of batch `index`."""
        weights = np.asarray(
            [stage for start, stage in self.mixture if start <= index][-1], np.float64
        )
        which = int(np.searchsorted(np.cumsum(weights) / weights.sum(), draw, side="right"))
        return self.buckets[min(which, int(np.flatnonzero(weights)[-1]))]

    def problems(self, index: int) -> list[Problem]:
        """The problems of batch `index`, none in one of an auxiliary task; no two batches share a
        problem index.
        """
        if self.bucket_of(index).task is not None:
            return []
        return [
            item
            for item, _, _ in self._fitting(
                index, self.batch_tokens // self.bucket_of(index).length
            )
        ]

    def _fitting(self, index: int, wanted: int) -> list[tuple[Problem, list[int], list[int]]]:
        """The first problems of batch `index` and their ids; those too long for the bucket are
        passed over.
        """
        bucket = self.bucket_of(index)
        stride = _TRIES * (self.batch_tokens // min(bucket.length for bucket in self.buckets))
        steps = (bucket.steps_low, bucket.steps_high)
        fitting: list[tuple[Problem, list[int], list[int]]] = []
        first = index * stride
        while len(fitting) < wanted:
            last = min(first + wanted - len(fitting), (index + 1) * stride)
            items = [problem(self.seed, i, self.split, steps) for i in range(first, last)]
            rows = zip(items, self._ids(items), strict=True)
            fitting += [
                (x, *ids) for x, ids in rows if len(ids[0]) + len(ids[1]) <= bucket.length + 1
            ]
            first = last
            if first == (index + 1) * stride and len(fitting) < wanted:
                raise ValueError(
                    f"most problems of {steps} steps do not fit into {bucket.length} positions"
                )
        return fitting

    def __call__(self, index: int) -> Batch:
        """Batch `index` as {"tokens", "targets", "weights"}, each [B, T]."""
        return self.part(index, whole).rows

    def part(self, index: int, share: Share) -> Part:
        """Rows of batch `index`; of problems those before them are drawn too, since some are passed
        over.
        """
        bucket = self.bucket_of(index)
        count = self.batch_tokens // bucket.length
        first, last = share(count)
        make = self._solutions if bucket.task is None else self._practice
        return Part(make(index, bucket, first, last), first, count)

    def _solutions(self, index: int, bucket: Bucket, first: int, last: int) -> Batch:
        """Rows of problems, weighted at their prompts and solutions."""
        rows = [(prompt, solution) for _, prompt, solution in self._fitting(index, last)[first:]]
        tokens = np.full((len(rows), bucket.length + 1), self.spec.pad, np.int32)
        weights = np.zeros((len(rows), bucket.length), np.float32)
        for i, (prompt, solution) in enumerate(rows):
            end = len(prompt) + len(solution)
            tokens[i, :end] = prompt + solution
            weights[i, : len(prompt) - 1] = self.prompt_weight
            weights[i, len(prompt) - 1 : end - 1] = 1
        return {
            "tokens": tokens[:, :-1].copy(),
            "targets": tokens[:, 1:].copy(),
            "weights": weights,
        }

    def _practice(self, index: int, bucket: Bucket, first: int, last: int) -> Batch:
        """Rows of practice, weighted at the tokens of their spans."""
        assert bucket.task is not None
        count, width = last - first, bucket.length
        stride = self.batch_tokens // min(bucket.length for bucket in self.buckets)
        tokens = np.full((count, width + 1), self.spec.pad, np.int32)
        weights = np.zeros((count, width + 1), np.float32)
        for i in range(count):
            ids, counted = self.practice(index * stride + first + i, bucket.task)
            tokens[i, : len(ids)] = ids[: width + 1]
            weights[i, : len(counted)] = counted[: width + 1]
        return {
            "tokens": tokens[:, :-1].copy(),
            "targets": tokens[:, 1:].copy(),
            "weights": weights[:, 1:].copy(),
        }

    def practice(self, number: int, task: str) -> tuple[list[int], list[bool]]:
        """Practice row `number` of a kind: its ids, and which of them lie in its spans."""
        item = auxiliary_task(self.seed, number, task)
        read = self.tokenizer.begun(self.tokenizer.encode(item.prompt), self.spec.bos)
        written, offsets = self.tokenizer.encode_with_offsets(item.answer, item.prompt)
        inside = np.zeros(len(item.answer) + 1, bool)
        for low, high in item.spans:
            inside[low:high] = True
        counted = [bool(inside[low:high].any()) for low, high in offsets]
        return [*read, *written], [*[False] * len(read), *counted]

    def solved(self, number: int, bucket: Bucket) -> tuple[list[int], list[int]]:
        """Problem `number` of a bucket as ids: (bos + prompt, solution + stop)."""
        steps = (bucket.steps_low, bucket.steps_high)
        return self._ids([problem(self.seed, number, self.split, steps)])[0]

    def _ids(self, problems: list[Problem]) -> list[tuple[list[int], list[int]]]:
        """Ids of each problem: (bos + prompt, solution + stop)."""
        words, spec = self.tokenizer, self.spec
        return [
            (
                words.begun(words.encode(item.prompt), spec.bos),
                [*words.encode_after(item.prompt, item.solution), spec.stop[0]],
            )
            for item in problems
        ]


def word_problem_batches(
    tokenizer: Tokenizer,
    *,
    seed: int,
    split: str = "train",
    batch_tokens: int = 16_384,
    buckets: Sequence[Bucket] = BUCKETS,
    mixture: Mixture = MIXTURE,
    prompt_weight: float = 0.0,
    spec: TokenSpec | None = None,
    prefetch: int = 2,
) -> Endless:
    """An endless iterator over batches of word problems; `get_state` and `set_state` resume it
    exactly.

    A row is bos + prompt + solution + stop. A batch is B = batch_tokens // T rows of one bucket of
    length T: {"tokens": int32 [B, T], "targets": int32 [B, T], "weights": float32 [B, T]}. Targets
    are the tokens one position later; weights are 1 where the target belongs to the answer
    (solution and stop token), `prompt_weight` where it belongs to the prompt and 0 on padding.

    Args:
      tokenizer: the tokenizer of the model.
      seed: non-negative seed; batch i is a pure function of (seed, i) and the other arguments.
      split: "train", "tune" or "test".
      batch_tokens: positions of a batch, padding included.
      buckets: the shapes of batches.
      mixture: stages (first batch index, weight of each bucket) in ascending order, the first at 0.
      prompt_weight: weight of a prompt's tokens in the loss.
      spec: special tokens of the model; those of `build_tokenizer` when None.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.

    Raises:
      ValueError: when an argument is out of range or problems do not fit their bucket.
    """
    stages = tuple((int(start), tuple(float(w) for w in weights)) for start, weights in mixture)
    spec = token_spec() if spec is None else spec
    make = BatchMaker(
        tokenizer, seed, split, batch_tokens, tuple(buckets), stages, prompt_weight, spec
    )
    return Endless(make, prefetch)


def _check_mixture(mixture: tuple[tuple[int, tuple[float, ...]], ...], buckets: int) -> None:
    starts = [start for start, _ in mixture]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(
            f"mixture must have ascending stages, the first at batch 0, not at {starts}"
        )
    for start, weights in mixture:
        if len(weights) != buckets or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(
                f"mixture from batch {start} must give {buckets} weights, none negative and one positive, "
                f"not {list(weights)}"
            )
