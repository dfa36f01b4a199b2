"""Stored Jacobi trajectories: a folder of shards, columns of plain arrays that are mapped into memory.

::

    manifest.json        format version, block size, settings of the run, generations of each shard
    shard-00000/
      ids.npy            [M]         id of each generation's problem
      prompts.npy        [sum P]     prompts, one after the other
      prompt_ends.npy    [M]         where each prompt ends
      lengths.npy        [M]         tokens of each generation's text, the stop token included
      block_ends.npy     [M]         where each generation's blocks end
      point_ends.npy     [blocks]    where each block's iterates end
      points.npy         [iterates, n] every iterate: the draft first, the fixed point last

A generation is stored once, with all of its blocks: each block follows the prompt and the fixed points before it.
A shard appears whole or not at all, and counts once the manifest names it. Nothing is ever unpickled.
"""

import bisect
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int

from paradec_jax.io import atomic_write_text

FORMAT_VERSION = 2
COLUMNS = {
    "ids": np.int64,
    "prompts": np.int32,
    "prompt_ends": np.int64,
    "lengths": np.int64,
    "block_ends": np.int64,
    "point_ends": np.int64,
    "points": np.int32,
}
_MANIFEST = "manifest.json"


class TrajectoryError(ValueError):
    """A folder of trajectories that cannot be read or written."""


class Block(NamedTuple):
    """One block of a generation.

    Attributes:
      data_id: id of the problem.
      place: its place among the generation's blocks, from 0.
      prompt: the problem's tokens, without any of the generation.
      generated: tokens generated before the block.
      iterates: all iterates, the draft first.
      fixed: the last of them, the fixed point.
    """

    data_id: int
    place: int
    prompt: Int[np.ndarray, " P"]
    generated: Int[np.ndarray, " L"]
    iterates: Int[np.ndarray, "X n"]
    fixed: Int[np.ndarray, " n"]


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
        shapes = {np.shape(iterates)[1:] for iterates in self.iterates}
        if len(shapes) != 1 or any(
            np.ndim(iterates) != 2 or len(iterates) == 0 for iterates in self.iterates
        ):
            raise ValueError(f"iterates of generation {self.data_id} must be [X, n] with one n and X >= 1")
        if not 0 < self.text_length <= len(self.iterates) * self.block_size:
            raise ValueError(
                f"length of generation {self.data_id} must be from 1 to {len(self.iterates) * self.block_size}, "
                f"the tokens of its blocks, not {self.length}"
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

    def first(self, blocks: int) -> "Generation":
        """Its first blocks alone."""
        iterates = self.iterates[:blocks]
        length = min(self.text_length, len(iterates) * self.block_size)
        return Generation(self.data_id, self.prompt, iterates, length)

    def block(self, place: int) -> Block:
        """Block `place` with what comes before it."""
        iterates = self.iterates[place]
        generated = self.fixed[:place].reshape(-1)
        return Block(self.data_id, place, self.prompt, generated, iterates, iterates[-1])


class TrajectoryWriter:
    """Appends generations to a folder; a run that was stopped goes on after its last whole shard.

    As a context manager it writes what is left when the block ends without an error.

    ::

        with TrajectoryWriter(folder, block_size=16, settings={"seed": 0}) as writer:
            for problem in problems[writer.count:]:
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
        settings = json.loads(json.dumps(dict(settings or {})))
        self._manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "block_size": block_size,
            "settings": settings,
            "shards": [],
        }
        if (self.folder / _MANIFEST).exists():
            found = read_manifest(self.folder)
            for name in ("block_size", "settings"):
                if found[name] != self._manifest[name]:
                    raise TrajectoryError(
                        f"{self.folder} was written with {name} {found[name]!r}, not {self._manifest[name]!r}"
                    )
            self._manifest = found
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def count(self) -> int:
        """Generations in whole shards: where a stopped run goes on."""
        return sum(shard["generations"] for shard in self._manifest["shards"])

    @property
    def shards(self) -> int:
        """Whole shards."""
        return len(self._manifest["shards"])

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
        name = f"shard-{len(self._manifest['shards']):05d}"
        temporary, final = self.folder / f".{name}.writing", self.folder / name
        for leftover in (temporary, final):  # of a run that was stopped here
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        for column, values in _columns(self._waiting).items():
            np.save(temporary / f"{column}.npy", values, allow_pickle=False)
        temporary.rename(final)
        shards = [*self._manifest["shards"], {"name": name, "generations": len(self._waiting)}]
        self._manifest = {**self._manifest, "shards": shards}
        atomic_write_text(self.folder / _MANIFEST, json.dumps(self._manifest, indent=2) + "\n")
        self._waiting = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()


def _columns(generations: Sequence[Generation]) -> dict[str, np.ndarray]:
    blocks = [iterates for generation in generations for iterates in generation.iterates]
    columns = {
        "ids": [generation.data_id for generation in generations],
        "prompts": np.concatenate([generation.prompt for generation in generations]),
        "prompt_ends": np.cumsum([len(generation.prompt) for generation in generations]),
        "lengths": [generation.text_length for generation in generations],
        "block_ends": np.cumsum([len(generation.iterates) for generation in generations]),
        "point_ends": np.cumsum([len(iterates) for iterates in blocks]),
        "points": np.concatenate(blocks),
    }
    return {name: np.asarray(values, COLUMNS[name]) for name, values in columns.items()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
      TrajectoryError: there is none, or it is not of this format.
    """
    path = Path(folder) / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrajectoryError(f"{folder} holds no trajectories: it has no {_MANIFEST}") from None
    except ValueError as error:
        raise TrajectoryError(f"{path} is not JSON: {error}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise TrajectoryError(f"{path} has format version {version!r}; this program reads {FORMAT_VERSION}")
    missing = {"block_size", "settings", "shards"} - manifest.keys()
    if missing:
        raise TrajectoryError(f"{path} lacks {', '.join(sorted(missing))}")
    return manifest


class Trajectories(Sequence[Generation]):
    """The generations of one or more folders, read as they are asked for.

    Args:
      folders: folders that a `TrajectoryWriter` has written, all with the same block size.

    Raises:
      TrajectoryError: a folder cannot be read, is damaged, empty, or differs in block size.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        manifests = [(Path(folder), read_manifest(Path(folder))) for folder in folders]
        sizes = {manifest["block_size"] for _, manifest in manifests}
        if len(sizes) != 1:
            raise TrajectoryError(f"folders must have one block size, not {sorted(sizes)}")
        self.block_size: int = sizes.pop()
        self._shards = [
            _open_shard(folder / shard["name"], shard["generations"], self.block_size)
            for folder, manifest in manifests
            for shard in manifest["shards"]
        ]
        if not self._shards:
            raise TrajectoryError(f"{', '.join(map(str, folders))} has no whole shard yet")
        self._ends = np.cumsum([len(shard["ids"]) for shard in self._shards]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index) + len(self) * (index < 0)
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        shard, row = self._shards[which], index - (self._ends[which - 1] if which else 0)
        blocks = range(*_span(shard["block_ends"], row))
        iterates = [shard["points"][slice(*_span(shard["point_ends"], block))] for block in blocks]
        prompt = shard["prompts"][slice(*_span(shard["prompt_ends"], row))]
        return Generation(int(shard["ids"][row]), prompt, iterates, int(shard["lengths"][row]))

    def __iter__(self) -> Iterator[Generation]:
        return (self[i] for i in range(len(self)))

    @property
    def ids(self) -> Int[np.ndarray, " M"]:
        """Problem of each generation."""
        return np.concatenate([shard["ids"] for shard in self._shards])

    @property
    def prompt_lengths(self) -> Int[np.ndarray, " M"]:
        """Prompt tokens of each generation."""
        return np.concatenate([np.diff(shard["prompt_ends"], prepend=0) for shard in self._shards])

    @property
    def block_counts(self) -> Int[np.ndarray, " M"]:
        """Blocks of each generation."""
        return np.concatenate([np.diff(shard["block_ends"], prepend=0) for shard in self._shards])


def _span(ends: np.ndarray, index: int) -> tuple[int, int]:
    return (int(ends[index - 1]) if index else 0), int(ends[index])


def _open_shard(folder: Path, generations: int, block_size: int) -> dict[str, np.ndarray]:
    shard = {}
    for name, dtype in COLUMNS.items():
        path = folder / f"{name}.npy"
        try:
            shard[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise TrajectoryError(f"{path} cannot be read: {error}") from None
        axes = 2 if name == "points" else 1
        if shard[name].dtype != dtype or shard[name].ndim != axes:
            raise TrajectoryError(f"{path} must hold {np.dtype(dtype)} of {axes} axes")
    chain = (("block_ends", "point_ends"), ("point_ends", "points"), ("prompt_ends", "prompts"))
    for ends, values in chain:
        steps = np.diff(shard[ends], prepend=0)
        if len(steps) == 0 or steps.min() < 1 or shard[ends][-1] != len(shard[values]):
            raise TrajectoryError(f"{folder}: {ends} must grow to the {len(shard[values])} of {values}")
    counts = {len(shard[name]) for name in ("ids", "prompt_ends", "lengths", "block_ends")}
    if counts != {generations} or shard["points"].shape[1] != block_size:
        raise TrajectoryError(f"{folder} contradicts its manifest: damaged, or of another run")
    return shard
