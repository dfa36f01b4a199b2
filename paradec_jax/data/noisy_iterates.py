"""Which iterates of stored trajectories become training pairs: filters, noise schedules, packing.

The noise ratio of an iterate is the share of its block from the first token on that differs from the fixed point:

    ratio = (n - f) / n,    f = first offset that differs (n if none)

Block j of a generation gets the iterate whose ratio is nearest to `schedule[j mod w]`, so that noise rises and falls
along the sequence (progressive noise; Jacobi Forcing, Hu et al. 2025, arXiv 2512.14681, section 4: "the paper" below;
CLLM is Kou et al. 2024, arXiv 2403.00835).
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from paradec_jax.data.trajectories import Generation

ORDERS = ("linear", "reverse", "random", "uniform")


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
      low, high: ends of the ramp.
      grid: "inclusive": linspace(low, high, w), released; "exclusive": steps of 1/w that leave out `high`, the
        paper's {0, 1/w, ..., (w-1)/w}.
      first_iterate: "draft": the stored first iterate, a random draft (what happened), may be chosen; "fixed": the
        first iterate counts as equal to the fixed point, as in the released data, which overwrote it.
    """

    order: str = "linear"
    window: int = 16
    low: float = 0.0
    high: float = 1.0
    grid: str = "inclusive"
    first_iterate: str = "draft"

    def __post_init__(self) -> None:
        choices = {"order": ORDERS, "grid": ("inclusive", "exclusive"), "first_iterate": ("draft", "fixed")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low and high must satisfy 0 <= low <= high <= 1, not {self.low}, {self.high}")

    @property
    def schedule(self) -> Float[np.ndarray, " w"]:
        """The ramp."""
        inclusive = self.grid == "inclusive"
        ramp = np.linspace(self.low, self.high, self.window, endpoint=inclusive)
        return ramp[::-1] if self.order == "reverse" else ramp

    def targets(self, blocks: int, rng: np.random.Generator, first: int = 0) -> Float[np.ndarray, " T"]:
        """The wanted noise ratio of blocks `first`, `first + 1`, ... (NaN for "uniform")."""
        if self.order == "uniform":
            return np.full(blocks, np.nan)
        random = self.order == "random"
        index = rng.integers(self.window, size=blocks) if random else np.arange(first, first + blocks)
        return self.schedule[index % self.window]

    def iterates(self, iterates: Int[np.ndarray, "X n"]) -> Int[np.ndarray, "X n"]:
        """A block's iterates as the selection sees them."""
        return iterates if self.first_iterate == "draft" else np.concatenate([iterates[-1:], iterates[1:]])

    def choose(self, iterates: Int[np.ndarray, "X n"], target: float, rng: np.random.Generator) -> int:
        """Index of the iterate whose ratio is nearest to `target`, the first of equals."""
        if self.order == "uniform":
            return int(rng.integers(max(len(iterates) - 1, 1)))
        return int(np.argmin(np.abs(noise_ratio(iterates) - target)))


def pack(generation: Generation, selection: Selection, rng: np.random.Generator, first: int = 0) -> Example:
    """The training sequence of a generation: all of its blocks, which the schedule counts from `first` on."""
    targets = selection.targets(len(generation.iterates), rng, first)
    blocks = [selection.iterates(iterates) for iterates in generation.iterates]
    chosen = [
        selection.choose(iterates, target, rng) for iterates, target in zip(blocks, targets, strict=True)
    ]
    noisy = np.stack([iterates[i] for iterates, i in zip(blocks, chosen, strict=True)])
    fixed, length = generation.fixed, generation.text_length
    return Example(generation.data_id, generation.prompt, noisy, fixed, np.asarray(chosen), length)


def pack_block(generation: Generation, index: int, selection: Selection, rng: np.random.Generator) -> Example:
    """One block alone, what comes before it being part of the prompt (CLLM's examples)."""
    block, before = generation.block(index), index * generation.block_size
    prompt = np.concatenate([block.prompt, block.generated])
    length = min(generation.text_length - before, generation.block_size)
    return pack(Generation(block.data_id, prompt, [block.iterates], length), selection, rng, block.place)


def longest_run(tokens: Int[np.ndarray, " L"]) -> int:
    """How often a token is repeated in a row at most."""
    if len(tokens) == 0:
        return 0
    edges = np.flatnonzero(np.diff(tokens)) + 1
    return int(np.diff([0, *edges, len(tokens)]).max())


def kept(
    generations: Iterable[Generation],
    *,
    max_tokens: int = 20_480,
    max_run: int = 9,
    stop: tuple[int, ...] = (),
    unique: bool = False,
) -> Int[np.ndarray, " M"]:
    """Indices of the generations worth training on, in ascending order.

    Args:
      generations: all of them, such as `Trajectories`.
      max_tokens: longest packed sequence P + 2 T n (released: 20,480).
      max_run: how often one token may stand in a row in the generation, up to its first stop token (CLLM dropped
        those with 10).
      stop: stop tokens.
      unique: of equal prompts only the first stays.
    """
    found: dict[object, int] = {}
    for index, item in enumerate(generations):
        tokens = item.fixed.reshape(-1)
        ends = np.flatnonzero(np.isin(tokens, stop))
        spoken = tokens[: ends[0]] if len(ends) else tokens
        if len(item.prompt) + 2 * len(tokens) > max_tokens or longest_run(spoken) > max_run:
            continue
        found.setdefault(item.prompt.tobytes() if unique else index, index)
    return np.asarray(sorted(found.values()), np.int64)


def corrupted(
    data_id: int,
    prompt: Int[np.ndarray, " P"],
    answer: Int[np.ndarray, " A"],
    *,
    block_size: int,
    pad: int,
    rng: np.random.Generator,
    context: int = 128,
) -> Generation:
    """Trajectories without a model: for c = n .. 0 the last c tokens of a block are random.

    Args:
      data_id: id of the problem.
      prompt: its tokens, at least one.
      answer: the true answer, cut into blocks of `block_size`.
      block_size: n.
      pad: fills up the last block, after the text (released: the stop token).
      rng: draws with replacement from the tokens before the block.
      context: how many of those, counted from the block backwards (released: 128, or 10 n).

    Raises:
      ValueError: an empty prompt or answer, or a size below 1.
    """
    if len(prompt) == 0 or len(answer) == 0 or block_size < 1 or context < 1:
        raise ValueError("corrupted needs a prompt, an answer, block_size and context of at least 1")
    filled = np.concatenate([answer, np.full(-len(answer) % block_size, pad)])
    tokens = np.concatenate([prompt, filled]).astype(np.int32)
    trajectories = []
    for start in range(len(prompt), len(tokens), block_size):
        before, block = tokens[max(start - context, 0) : start], tokens[start : start + block_size]
        draws = rng.choice(before, size=(block_size + 1, block_size))
        right = np.arange(block_size) >= np.arange(block_size + 1)[:, None]
        trajectories.append(np.where(right, draws, block))
    return Generation(data_id, tokens[: len(prompt)], trajectories, len(answer))
