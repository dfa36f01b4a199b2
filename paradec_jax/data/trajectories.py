"""Jacobi trajectories on disk: a folder of memory-mapped shards, each of which appears whole or not
at all.

::

    index.json        format version, block size n, settings of the collection
    shard-00000.npy   int32: M, the ends of the M rows, the rows one after the other, a digest
    row               id, tokens of text, P, T, then [T] iterates of each block, the prompt [P], all iterates [X, n]

A generation is stored once, with all of its blocks: each follows the prompt and the fixed points
before it. A row without a block (T = 0) says that its prompt was decoded and gave none, so that
nobody decodes it again.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from paradec_jax.io import AnyPath, atomic_write_text, read_object, regular, replacing
from paradec_jax.records import record

FORMAT_VERSION = 5
INDEX, SHARD = "index.json", "shard-{:05d}.npy"
HEAD = 4  # numbers of a row before its counts


@record
class Generation:
    """All trajectories of one prompt; the last block may run past the stop token.

    Attributes:
      id: number of the prompt.
      prompt: its tokens.
      iterates: iterates of each block [X, n], the draft first, the fixed point last.
      length: tokens of text in the blocks; what comes after them is padding.
    """

    id: int
    prompt: Int[np.ndarray, " P"]
    iterates: Sequence[Int[np.ndarray, "X n"]]
    length: int

    @property
    def fixed(self) -> Int[np.ndarray, "T n"]:
        """The fixed points, which together are the generated tokens."""
        return np.stack([iterates[-1] for iterates in self.iterates])

    def alone(self, place: int) -> "Generation":
        """One of its blocks as a generation of its own: what comes before the block is part of the
        prompt.
        """
        fixed = self.fixed
        prompt = np.concatenate([self.prompt, fixed[:place].reshape(-1)])
        length = min(self.length - fixed[:place].size, fixed.shape[1])
        return Generation(self.id, prompt, [self.iterates[place]], length)


def claim(folder: AnyPath, block: int, settings: Mapping[str, Any]) -> None:
    """Begins a folder, or goes on with one of the same block size and settings, which JSON can
    hold.

    Raises:
      ValueError: the folder was begun with others.
    """
    path = Path(folder) / INDEX
    index = {"format_version": FORMAT_VERSION, "block": block, "settings": dict(settings)}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(index, indent=2) + "\n")
    for name, value in read_index(folder).items():
        if value != index.get(name):
            raise ValueError(f"{folder} was written with {name} {value!r}, not {index.get(name)!r}")


def append(folder: AnyPath, generations: Iterable[Generation]) -> None:
    """Writes a shard more. Only one process at a time may do so."""
    rows = []
    for item in generations:
        counts = [len(iterates) for iterates in item.iterates]
        head = [item.id, item.length, len(item.prompt), len(counts), *counts]
        rows.append(np.concatenate([head, item.prompt, *map(np.ravel, item.iterates)]))
    ends = np.cumsum([len(row) for row in rows])
    shard = np.concatenate([[len(rows)], 1 + len(rows) + ends, *rows]).astype(np.int32)
    path = Path(folder) / SHARD.format(len(_shards(folder)))
    with replacing(path) as file:
        np.save(file, np.concatenate([shard, _digest(path, shard)]))


def _digest(path: Path, shard: np.ndarray) -> np.ndarray:
    """SHA-256 of a shard, its name and its folder's index: that of another folder is no shard of
    this one.
    """
    about = f"{path.name}{read_index(path.parent)}".encode()
    return np.frombuffer(hashlib.sha256(about + shard.tobytes()).digest(), np.int32)


def _shards(folder: AnyPath) -> list[Path]:
    """The shards of a folder in their order. Raises ValueError where one is missing."""
    shards = sorted(Path(folder).glob("shard-*.npy"))
    for number, path in enumerate(shards):
        if path.name != (name := SHARD.format(number)):
            raise ValueError(f"{folder} lacks {name}")
    return shards


def read_index(folder: AnyPath) -> dict[str, Any]:
    """The index of a folder.

    Raises:
      ValueError: there is none, or it is not of this format.
    """
    index = read_object(Path(folder) / INDEX)
    version = index.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format version {version!r}; this program reads {FORMAT_VERSION}"
        )
    return index


class Trajectories(Sequence[Generation]):
    """The generations of a folder that have blocks, memory-mapped.

    Attributes:
      block: n, tokens of a block.
      decoded: ids of all prompts that were decoded, without a block too.
      ids, prompt_lengths, block_counts: id, prompt tokens P and blocks T of each generation.

    Raises:
      ValueError: the folder cannot be read or is damaged.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.block = int(read_index(folder)["block"])
        rows = [row for path in _shards(folder) for row in self._rows_of(path)]
        self.decoded = {int(row[0]) for row in rows}
        self._rows = [row for row in rows if row[3] > 0]
        heads = np.asarray([row[:HEAD] for row in self._rows], np.int64).reshape(-1, HEAD)
        self.ids, _, self.prompt_lengths, self.block_counts = heads.T

    def _rows_of(self, path: Path) -> list[Int[np.ndarray, " row"]]:
        try:
            shard, digest = np.split(np.load(regular(path), mmap_mode="r").view(np.ndarray), [-8])
        except Exception as error:  # NumPy raises whatever its parser of headers does
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not np.array_equal(digest, _digest(path, shard)):
            raise ValueError(f"{path} is damaged, or of another run")
        ends = shard[: 1 + shard[0]].tolist()
        ends[0] = len(ends)
        return [shard[first:last] for first, last in itertools.pairwise(ends)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        name, length, prompt, blocks = row[:HEAD].tolist()
        counts, row = row[HEAD : HEAD + blocks], row[HEAD + blocks :]
        iterates = np.split(row[prompt:].reshape(-1, self.block), np.cumsum(counts)[:-1])
        return Generation(name, row[:prompt], iterates, length)
