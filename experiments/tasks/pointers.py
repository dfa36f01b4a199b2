"""Chains of pointers: a task whose answers need as many look-ups, one after another, as a query is
from its end.

A prompt tells in any order who has whom, and then lists names; the answer lists, for each of them,
the name at the end of its chain, which has itself::

    Ana has Tom Zoe has Ana Tom has Tom ...? Zoe Ana  ->  = Tom Tom

No look-up is written down, and no answer helps with another. All prompts of a task have one length.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from experiments.tasks.vocabulary import token_spec
from experiments.tasks.words import NAMES, SPLITS
from paradec_jax.data.endless import Endless
from paradec_jax.text.tokenizer import Tokenizer

HAS, ASK, BEGIN = " has", "?", " ="


class Stage(NamedTuple):
    """What batches ask for from one of them on.

    Attributes:
      start: index of the first batch.
      names: N, of a table.
      recurrences: those that have a target.
      queries: Q, names asked about.
      rows: B, problems of a batch.
    """

    start: int
    names: int
    recurrences: int
    queries: int = 16
    rows: int = 48


class PointerProblem(NamedTuple):
    """One problem as text; `distance` is how many look-ups each query is from the end of its chain."""

    prompt: str
    solution: str
    distance: tuple[int, ...]


class Tables(NamedTuple):
    """Tables of pointers among names, and what is asked of them; names are indices of `NAMES`.

    Attributes:
      order: whose entries stand where, [B, N].
      pointer: whom each of all names has, itself where it has no entry, [B, V].
      queries: the names asked about, [B, Q].
      distance: look-ups from each query to the end of its chain, [B, Q].
    """

    order: Int32[np.ndarray, "B N"]
    pointer: Int32[np.ndarray, "B V"]
    queries: Int32[np.ndarray, "B Q"]
    distance: Int32[np.ndarray, "B Q"]

    def after(self, hops: int) -> Int32[np.ndarray, "K B Q"]:
        """The name that 0, 1, ... `hops - 1` look-ups lead to from each query."""
        names = [self.queries]
        for _ in range(1, hops):
            names.append(np.take_along_axis(self.pointer, names[-1], axis=1))
        return np.stack(names)


@dataclasses.dataclass(frozen=True)
class PointerTask:
    """The shape of the problems.

    Attributes:
      names: N, entries of a table.
      chains: C, chains of a table, of L = N / C names each.
      queries: Q, names asked about.

    Raises:
      ValueError: more names than there are, chains that do not divide them, or a chain of one.
    """

    names: int = 24
    chains: int = 2
    queries: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.names <= len(NAMES):
            raise ValueError(f"names must be from 2 to {len(NAMES)}, not {self.names}")
        if self.chains < 1 or self.names % self.chains or self.names == self.chains:
            raise ValueError(
                f"chains must divide the names into chains of two or more, not {self.chains}"
            )
        if self.queries < 1:
            raise ValueError(f"queries must be at least 1, not {self.queries}")

    @property
    def farthest(self) -> int:
        """L - 1, look-ups from the beginning of a chain to its end."""
        return self.names // self.chains - 1

    def draw(self, rng: np.random.Generator, nearest: Int32[np.ndarray, " B"]) -> Tables:
        """One table for each of `nearest`, the fewest look-ups that its queries may be from the
        end.

        Raises:
          ValueError: `nearest` below 0 or above `farthest`.
        """
        if nearest.min() < 0 or nearest.max() > self.farthest:
            raise ValueError(
                f"nearest must be from 0 to {self.farthest}, not {nearest.min()} to {nearest.max()}"
            )
        rows, length = len(nearest), self.farthest + 1
        everyone = np.tile(np.arange(len(NAMES)), (rows, 1))
        chosen = rng.permuted(everyone, axis=1)[:, : self.names]
        chains = chosen.reshape(rows, self.chains, length)
        to = np.concatenate([chains[..., :1], chains[..., :-1]], axis=-1)
        pointer = everyone.copy()
        np.put_along_axis(pointer, chosen, to.reshape(rows, -1), axis=1)
        order = rng.permuted(chosen, axis=1)
        distance = rng.integers(nearest[:, None], length, (rows, self.queries))
        chain = rng.integers(self.chains, size=(rows, self.queries))
        queries = chains[np.arange(rows)[:, None], chain, distance]
        return Tables(*(x.astype(np.int32) for x in (order, pointer, queries, distance)))


def pointer_problem(
    seed: int,
    index: int,
    split: str = "train",
    *,
    task: PointerTask | None = None,
    nearest: int = 0,
) -> PointerProblem:
    """Draws the problem of (seed, index, split, task, nearest), always the same one.

    Args:
      seed, index: non-negative numbers.
      split: "train", "tune" or "test".
      task: shape of the problem; that of `PointerTask()` when None.
      nearest: fewest look-ups that a query is from the end of its chain.

    Raises:
      ValueError: an unknown split, or `nearest` out of range.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    task = PointerTask() if task is None else task
    rng = np.random.Generator(np.random.Philox([seed, index * len(SPLITS) + SPLITS.index(split)]))
    table = task.draw(rng, np.full(1, nearest))
    entries = " ".join(
        f"{NAMES[name]}{HAS} {NAMES[table.pointer[0, name]]}" for name in table.order[0]
    )
    queries = " ".join(NAMES[name] for name in table.queries[0])
    answers = " ".join(NAMES[name] for name in table.after(task.farthest + 1)[-1, 0])
    return PointerProblem(
        f" {entries}{ASK} {queries}", f"{BEGIN} {answers}", tuple(table.distance[0].tolist())
    )


def pointer_problems(
    count: int,
    *,
    seed: int = 0,
    task: PointerTask | None = None,
    nearest: int = 0,
    split: str = "test",
) -> list[PointerProblem]:
    """The first `count` problems of a seed, at least one; the other arguments are those of
    `pointer_problem`.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count}")
    return [pointer_problem(seed, i, split, task=task, nearest=nearest) for i in range(count)]


def exact_lists(
    problems: Sequence[PointerProblem],
) -> Callable[[Sequence[str], Sequence[str]], Bool[np.ndarray, "N"]]:
    """Judges generations after the prompts of these problems: right are those that name all ends,
    and no more.
    """
    solutions = {item.prompt: item.solution for item in problems}

    def score(prompts: Sequence[str], texts: Sequence[str]) -> Bool[np.ndarray, "N"]:
        pairs = zip(prompts, texts, strict=True)
        return np.asarray([solutions[prompt] == text for prompt, text in pairs], bool)

    return score


@dataclasses.dataclass(frozen=True)
class _BatchMaker:
    """Makes batch i, a pure function of the fields and i. See `pointer_batches`."""

    tokenizer: Tokenizer
    seed: int
    chains: int
    curriculum: tuple[Stage, ...]
    noisy_share: float

    def __call__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.Generator(np.random.Philox([self.seed, index * len(SPLITS)]))
        stage = [stage for stage in self.curriculum if stage.start <= index][-1]
        task, rows = PointerTask(stage.names, self.chains, stage.queries), stage.rows
        table = task.draw(rng, rng.integers(task.farthest + 1, size=rows))
        ids = np.asarray([self.tokenizer.encode(f" {name}")[0] for name in NAMES], np.int32)
        has, ask, begin = (self.tokenizer.encode(text)[0] for text in (HAS, ASK, BEGIN))

        def column(token: int | None, width: int = 1) -> np.ndarray:
            return np.full((rows, width), token, np.int32)

        theirs = np.take_along_axis(table.pointer, table.order, axis=1)
        entries = np.stack(
            [ids[table.order], column(has, task.names), ids[theirs]], axis=-1
        ).reshape(rows, -1)
        most = max(stage.recurrences for stage in self.curriculum)
        # the last ones are the ends of the chains
        answers = ids[table.after(max(most, task.farthest + 1))]
        # Any draft may stand where an answer will: half of the wrong ones are names, half any
        # token.
        wrong = np.where(
            rng.random(answers[-1].shape) < 0.5,
            ids[rng.integers(len(ids), size=answers[-1].shape)],
            rng.integers(self.tokenizer.vocab_size, size=answers[-1].shape),
        )
        share = rng.random((rows, 1)) * (rng.random((rows, 1)) < self.noisy_share)
        drafts = np.where(rng.random(answers[-1].shape) < share, wrong, answers[-1])
        spec = token_spec()
        tokens = np.concatenate(
            [column(spec.bos), entries, column(ask), ids[table.queries], column(begin), drafts],
            axis=1,
        )
        keys, weights = np.zeros((2, rows, tokens.shape[1] - task.queries - 1), np.int32)
        ends = slice(3, 1 + 3 * task.names, 3)
        keys[:, ends], keys[:, -1] = ids[table.order], begin
        weights[:, ends], weights[:, -1] = 1, 1
        stop = np.broadcast_to(column(spec.stop[0]), (len(answers), rows, 1))
        return {
            "tokens": tokens.astype(np.int32),
            "targets": np.concatenate([answers, stop], axis=2)
            .astype(np.int32)[:most]
            .swapaxes(0, 1),
            "recurrences": np.int32(stage.recurrences),
            "prompt_targets": keys,
            "prompt_weights": weights.astype(np.float32),
        }


def pointer_batches(
    tokenizer: Tokenizer,
    *,
    seed: int,
    chains: int = 2,
    curriculum: Sequence[Stage] = (Stage(0, 24, 12),),
    noisy_share: float = 0.7,
    prefetch: int = 2,
) -> Endless:
    """An endless iterator over batches for `stepwise_loss`; `get_state` and `set_state` resume it
    exactly.

    A row is bos, the table, the queries, " =" and the answers. Targets are what is to be said after
    each recurrence: after the first the query itself, after the second whom it has, and so on to
    the end of the chain; after the last answer the stop token. The prompt is asked for the key of
    each entry where the entry ends, without which look-ups take much longer to learn, and for the
    first token of the answer: {"tokens": int32 [B, T], "targets": int32 [B, K, Q + 1],
    "recurrences": int32 [], "prompt_targets": int32 [B, S], "prompt_weights": float32 [B, S]}.

    Args:
      tokenizer: the tokenizer of the model.
      seed: non-negative seed; batch i is a pure function of (seed, i) and the other arguments.
      chains: C, chains of a table.
      curriculum: stages in ascending order, the first from batch 0; the most recurrences of any are
        K.
      noisy_share: share of rows in which some of the answers are replaced as inputs, by names or
        any tokens, since a wave computes on drafts.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.
    """
    make = _BatchMaker(tokenizer, seed, chains, tuple(curriculum), noisy_share)
    return Endless(make, prefetch)
