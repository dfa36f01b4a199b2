"""Which iterates of stored trajectories become training pairs: filters, noise schedules, packing.

The noise ratio of an iterate is the share of its block from the first token on that differs from the fixed point:

    ratio = (n - f) / n,    f = first offset that differs (n if none)

Block j of a generation gets the iterate whose ratio is nearest to `schedule[j mod w]`, so that noise rises and falls
along the sequence (progressive noise; Jacobi Forcing, Hu et al. 2025, arXiv 2512.14681, section 4). The schedule is
that of the released data, linspace(0, 1, w); the paper has {0, 1/w, ..., (w-1)/w}.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.data.trajectories import Generation

MAX_TOKENS = 20_480  # longest packed sequence, as released
MAX_RUN = 9  # how often one token may stand in a row: CLLM (arXiv 2403.00835) dropped answers with 10


class Example(NamedTuple):
    """One training sequence of T pairs.

    Attributes:
      data_id: id of the problem.
      prompt: its tokens.
      noisy, clean: the chosen iterate and the fixed point of each block.
      chosen: index of the chosen iterate in its trajectory.
      length: tokens of text in the blocks of either copy; the rest is padding.
    """

    data_id: int
    prompt: Int[np.ndarray, " P"]
    noisy: Int[np.ndarray, "T n"]
    clean: Int[np.ndarray, "T n"]
    chosen: Int[np.ndarray, " T"]
    length: int

    def packed(self) -> Int[np.ndarray, " P+2Tn"]:
        """The prompt, then each block's noisy copy followed by its clean one: the released order."""
        return np.concatenate([self.prompt, np.stack([self.noisy, self.clean], axis=1).reshape(-1)])


def noise_ratio(iterates: Int[np.ndarray, "X n"]) -> Float[np.ndarray, " X"]:
    """Share of each iterate from its first token on that differs from the last iterate."""
    size = iterates.shape[1]
    differs = iterates != iterates[-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), size)
    return (size - first) / size


@dataclasses.dataclass(frozen=True)
class Selection:
    """Chooses a noisy iterate for each block; the defaults are those of the released data.

    Attributes:
      order: "linear" (rising ramp over a window of blocks), "reverse" (falling), "random" (any entry of the ramp
        for each block) or "uniform" (no ramp: any iterate but the last, as CLLM does).
      window: w, blocks of a ramp, and its number of entries.
    """

    order: str = "linear"
    window: int = 16

    def __post_init__(self) -> None:
        check_words(self, order=("linear", "reverse", "random", "uniform"))
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")

    @property
    def schedule(self) -> Float[np.ndarray, " w"]:
        """The ramp."""
        ramp = np.linspace(0, 1, self.window)
        return ramp[::-1] if self.order == "reverse" else ramp

    def targets(self, blocks: int, rng: np.random.Generator, first: int = 0) -> Float[np.ndarray, " T"]:
        """The wanted noise ratio of blocks `first`, `first + 1`, ... (NaN for "uniform")."""
        if self.order == "uniform":
            return np.full(blocks, np.nan)
        random = self.order == "random"
        index = rng.integers(self.window, size=blocks) if random else np.arange(first, first + blocks)
        return self.schedule[index % self.window]

    def choose(self, iterates: Int[np.ndarray, "X n"], target: float, rng: np.random.Generator) -> int:
        """Index of the iterate whose ratio is nearest to `target`, the first of equals."""
        if self.order == "uniform":
            return int(rng.integers(max(len(iterates) - 1, 1)))
        return int(np.argmin(np.abs(noise_ratio(iterates) - target)))


def pack(generation: Generation, selection: Selection, rng: np.random.Generator, first: int = 0) -> Example:
    """The training sequence of a generation: all of its blocks, which the schedule counts from `first` on."""
    blocks = generation.iterates
    targets = selection.targets(len(blocks), rng, first)
    chosen = [
        selection.choose(iterates, target, rng) for iterates, target in zip(blocks, targets, strict=True)
    ]
    noisy = np.stack([iterates[i] for iterates, i in zip(blocks, chosen, strict=True)])
    fixed, length = generation.fixed, generation.text_length
    return Example(generation.data_id, generation.prompt, noisy, fixed, np.asarray(chosen), length)


def longest_run(tokens: Int[np.ndarray, " L"]) -> int:
    """How often a token is repeated in a row at most."""
    if len(tokens) == 0:
        return 0
    edges = np.flatnonzero(np.diff(tokens)) + 1
    return int(np.diff([0, *edges, len(tokens)]).max())


def kept(
    generations: Iterable[Generation], *, stop: tuple[int, ...] = (), unique: bool = False
) -> Int[np.ndarray, " M"]:
    """Indices of the generations worth training on, in ascending order.

    A generation is dropped if its packed sequence P + 2 T n is longer than `MAX_TOKENS`, or if it repeats one token
    more than `MAX_RUN` times in a row before its first stop token.

    Args:
      generations: all generations, such as `Trajectories`.
      stop: stop tokens.
      unique: whether of equal prompts only the first stays.
    """
    first: dict[object, int] = {}  # index by prompt, or by itself
    for index, item in enumerate(generations):
        tokens = item.fixed.reshape(-1)
        ends = np.flatnonzero(np.isin(tokens, stop))
        spoken = tokens[: ends[0]] if len(ends) else tokens
        if len(item.prompt) + 2 * len(tokens) > MAX_TOKENS or longest_run(spoken) > MAX_RUN:
            continue
        first.setdefault(item.prompt.tobytes() if unique else index, index)
    return np.asarray(sorted(first.values()), np.int64)
