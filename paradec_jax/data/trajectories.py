"""Stored Jacobi trajectories: a folder of shards, columns of plain arrays, and an index.

::

    index.json          format version, block size, settings of the run
    shard-00000.npz
      ids               [M]           id of each generation's problem
      prompts           [sum P]       prompts, one after the other
      prompt_lengths    [M]           tokens of each prompt
      lengths           [M]           tokens of each generation's text, the stop token included
      block_counts      [M]           blocks of each generation
      iterate_counts    [blocks]      iterates of each block
      iterates          [iterates, n] every iterate: the draft first, the fixed point last

A generation is stored once, with all of its blocks: each block follows the prompt and the fixed points before it.
A shard appears whole or not at all. All shards are read into memory, and nothing is ever unpickled.
"""

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from paradec_jax.io import atomic_write_text

FORMAT_VERSION = 3
INDEX = "index.json"
COLUMNS = ["ids", "prompts", "prompt_lengths", "lengths", "block_counts", "iterate_counts", "iterates"]


class TrajectoryError(ValueError):
    """A folder of trajectories that cannot be read or written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """All trajectories of one prompt; the last block may run past the stop token.

    Attributes:
      data_id: id of the problem.
      prompt: its tokens, at least one.
      iterates: iterates of each block [X, n], the draft first, the fixed point last.
      length: tokens of text in the blocks; what comes after them is padding. All of them when None.

    Raises:
      ValueError: an empty prompt, no block, iterates that are not [X, n] with one n, or a length beyond the blocks.
    """

    data_id: int
    prompt: Int[np.ndarray, " P"]
    iterates: Sequence[Int[np.ndarray, "X n"]]
    length: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0 or len(self.iterates) == 0:
            raise ValueError(f"generation {self.data_id} must have a prompt and at least one block")
        sizes = {np.shape(iterates)[1:] for iterates in self.iterates}
        if len(sizes) != 1 or any(np.ndim(x) != 2 or len(x) == 0 for x in self.iterates):
            raise ValueError(f"iterates of generation {self.data_id} must be [X, n] with one n and X >= 1")
        size = len(self.iterates) * self.block_size
        if not 0 < self.text_length <= size:
            raise ValueError(
                f"length of generation {self.data_id} must be from 1 to {size}, the tokens of its blocks, "
                f"not {self.length}"
            )

    @property
    def text_length(self) -> int:
        """Tokens of text in the blocks."""
        return len(self.iterates) * self.block_size if self.length is None else self.length

    @property
    def block_size(self) -> int:
        """n."""
        return self.iterates[0].shape[1]

    @property
    def fixed(self) -> Int[np.ndarray, "T n"]:
        """The fixed points, which together are the generated tokens."""
        return np.stack([iterates[-1] for iterates in self.iterates])

    def alone(self, place: int) -> "Generation":
        """One of its blocks as a generation of its own: what comes before the block is part of the prompt."""
        prompt = np.concatenate([self.prompt, self.fixed[:place].reshape(-1)])
        length = min(self.text_length - place * self.block_size, self.block_size)
        return Generation(self.data_id, prompt, [self.iterates[place]], length)


class TrajectoryWriter:
    """Appends generations to a folder; a run that was stopped goes on after its last whole shard.

    As a context manager it writes what is left when the block ends without an error.

    ::

        with TrajectoryWriter(folder, block_size=16, settings={"seed": 0}) as writer:
            for problem in problems:
                writer.add(...)

    Args:
      folder: made where it is missing. Only one writer at a time may use it.
      block_size: n.
      shard_size: generations of a shard.
      settings: facts of the run (model, decoder, seed) that JSON can hold; a resumed run must have the same.

    Raises:
      TrajectoryError: the folder was written with another block size or other settings.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        block_size: int,
        shard_size: int = 1024,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("block_size", block_size), ("shard_size", shard_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.folder, self.block_size, self.shard_size = Path(folder), block_size, shard_size
        self._waiting: list[Generation] = []
        mine = {"format_version": FORMAT_VERSION, "block_size": block_size, "settings": dict(settings or {})}
        mine = json.loads(json.dumps(mine))
        if (self.folder / INDEX).exists():
            written = read_index(self.folder)
            for name, value in mine.items():
                if written[name] != value:
                    raise TrajectoryError(
                        f"{self.folder} was written with {name} {written[name]!r}, not {value!r}"
                    )
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.folder / INDEX, json.dumps(mine, indent=2) + "\n")

    @property
    def shards(self) -> int:
        """Whole shards."""
        return len(_shards(self.folder))

    def add(self, generation: Generation) -> None:
        """Appends a generation; every `shard_size` of them become a shard.

        Raises:
          ValueError: its blocks have another size.
        """
        if generation.block_size != self.block_size:
            raise ValueError(f"blocks must have {self.block_size} tokens, not {generation.block_size}")
        self._waiting.append(generation)
        if len(self._waiting) == self.shard_size:
            self.flush()

    def flush(self) -> None:
        """Writes the generations that wait, if any, as a shard."""
        if not self._waiting:
            return
        final = self.folder / f"shard-{self.shards:05d}.npz"
        temporary = final.with_suffix(".writing")
        with open(temporary, "wb") as file:
            np.savez(file, **_columns(self._waiting))  # type: ignore[arg-type]
        temporary.rename(final)
        self._waiting = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.npz"))


def _columns(generations: Sequence[Generation]) -> dict[str, np.ndarray]:
    blocks = [iterates for generation in generations for iterates in generation.iterates]
    columns = {
        "ids": [generation.data_id for generation in generations],
        "prompts": np.concatenate([generation.prompt for generation in generations]).astype(np.int32),
        "prompt_lengths": [len(generation.prompt) for generation in generations],
        "lengths": [generation.text_length for generation in generations],
        "block_counts": [len(generation.iterates) for generation in generations],
        "iterate_counts": [len(iterates) for iterates in blocks],
        "iterates": np.concatenate(blocks).astype(np.int32),
    }
    return {name: np.asarray(values) for name, values in columns.items()}


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder.

    Raises:
      TrajectoryError: there is none, or it is not of this format.
    """
    path = Path(folder) / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrajectoryError(f"{folder} holds no trajectories: it has no {INDEX}") from None
    except ValueError as error:
        raise TrajectoryError(f"{path} is not JSON: {error}") from None
    version = index.get("format_version") if isinstance(index, dict) else None
    if version != FORMAT_VERSION:
        raise TrajectoryError(f"{path} has format version {version!r}; this program reads {FORMAT_VERSION}")
    return index


def _read_shard(path: Path, block_size: int) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            shard = {name: file[name] for name in COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TrajectoryError(f"{path} cannot be read: {error}") from None
    counted = (
        ("prompt_lengths", "prompts"),
        ("block_counts", "iterate_counts"),
        ("iterate_counts", "iterates"),
    )
    whole = all(shard[counts].sum() == len(shard[values]) for counts, values in counted)
    if not whole or shard["iterates"].shape[1:] != (block_size,):
        raise TrajectoryError(f"{path} is damaged, or of another run")
    return shard


class Trajectories(Sequence[Generation]):
    """The generations of one or more folders.

    Args:
      folders: folders that a `TrajectoryWriter` has written, all with the same block size.

    Attributes:
      ids, prompt_lengths, block_counts: problem, prompt tokens and blocks of each generation.

    Raises:
      TrajectoryError: a folder cannot be read, is damaged, empty, or differs in block size.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        sizes = {read_index(Path(folder))["block_size"] for folder in folders}
        if len(sizes) != 1:
            raise TrajectoryError(f"folders must have one block size, not {sorted(sizes)}")
        self.block_size: int = sizes.pop()
        shards = [_read_shard(path, self.block_size) for folder in folders for path in _shards(Path(folder))]
        if not shards:
            raise TrajectoryError(f"{', '.join(map(str, folders))} has no whole shard yet")
        whole = {name: np.concatenate([shard[name] for shard in shards]) for name in COLUMNS}
        self.ids, self.prompt_lengths, self.block_counts = (
            whole[name] for name in ("ids", "prompt_lengths", "block_counts")
        )
        self._lengths, self._iterates = whole["lengths"], whole["iterates"]
        self._prompts = np.split(whole["prompts"], np.cumsum(self.prompt_lengths)[:-1])
        self._blocks, self._ends = (
            np.concatenate([[0], np.cumsum(whole[name])]) for name in ("block_counts", "iterate_counts")
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        blocks = range(self._blocks[index], self._blocks[index + 1])
        iterates = [self._iterates[self._ends[block] : self._ends[block + 1]] for block in blocks]
        return Generation(int(self.ids[index]), self._prompts[index], iterates, int(self._lengths[index]))

    def __iter__(self) -> Iterator[Generation]:
        return (self[i] for i in range(len(self)))
