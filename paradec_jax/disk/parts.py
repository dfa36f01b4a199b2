"""The parameters of a part of a model folder: all that headers tell is checked first, then slices are read."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from paradec_jax.disk import blocks
from paradec_jax.disk.blocks import Spans
from paradec_jax.disk.description import check_leaf, check_names
from paradec_jax.disk.folders import StoreError
from paradec_jax.disk.tensors import INDEX, Lazy, TensorFiles, listed_in


class PartFiles:
    """The files of a part. Names, shapes, types and lengths of all its parameters were checked, and no number read.

    Args:
      folder: the model folder.
      config: the part's.
      part: the section of config.json: where the weights are, and their digests.
      expected: shape and type of each parameter by its path.
      verify: whether what is read is compared with its digests.
      allow_nonfinite: whether numbers may be NaN or infinite.

    Raises:
      StoreError: files that are missing, damaged, or not those of the config.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        part: Mapping[str, Any],
        expected: Mapping[str, Any],
        verify: bool = True,
        allow_nonfinite: bool = False,
    ) -> None:
        self.folder, self.config, self.expected = folder, config, expected
        self.recorded: Mapping[str, Any] = part["sha256"]
        self._verify, self._allow_nonfinite = verify, allow_nonfinite
        with self._named():
            check_names(expected, self.recorded.keys())
            file = folder / part["weights"]
            with contextlib.ExitStack() as closing:
                listed = listed_in(file) if file.name.endswith(INDEX) else {file: []}
                files = closing.enter_context(TensorFiles(listed))
                check_names(expected, files.names)
                for path, leaf in expected.items():
                    check_leaf(expected, path, files.header(path))
                    if verify:
                        size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
                        digests = self.recorded[path]
                        if not isinstance(digests, list) or len(digests) != max(-(-size // blocks.BLOCK), 1):
                            raise blocks.differs(path)
                closing.pop_all()
            self._files = files

    def __enter__(self) -> "PartFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, value, trace)

    def each(
        self, wanted: Callable[[str], Sequence[Spans]], dtype: str | None = None
    ) -> Iterator[tuple[str, list[np.ndarray]]]:
        """The paths of all parameters, each with the slices of it that are wanted, in that type or as stored.

        Raises:
          StoreError: bytes that differ from their digests, or numbers that are NaN or infinite.
        """
        for path in self.expected:
            yield path, self._slices(path, wanted(path), dtype)

    def placed(self, places: Mapping[str, jax.sharding.Sharding], dtype: str | None) -> dict[str, jax.Array]:
        """Arrays that lie as `places` says, by their paths; this process reads what its own devices hold."""

        def held(path: str) -> list[Spans]:
            shape = self.expected[path].shape
            indices = places[path].addressable_devices_indices_map(shape).values()
            return list(dict.fromkeys(blocks.spans(index or (), shape) for index in indices))

        arrays: dict[str, jax.Array] = {}
        for path, slices in self.each(held, dtype):
            leaf, mine = self.expected[path], dict(zip(held(path), slices, strict=True))
            own = lambda index, mine=mine, leaf=leaf: mine[blocks.spans(index, leaf.shape)]  # noqa: E731
            arrays[path] = jax.make_array_from_callback(
                leaf.shape, places[path], own, dtype=dtype or leaf.dtype
            )
        return arrays

    def lazy(self) -> dict[str, Any]:
        """All parameters by their paths, to be read when they are indexed."""
        return {
            path: Lazy(leaf.shape, leaf.dtype, functools.partial(self._at, path))
            for path, leaf in self.expected.items()
        }

    def _at(self, path: str, place: Any) -> np.ndarray:
        """What NumPy's indexing gives; of a leading integer that layer of stacked parameters alone is read."""
        shape = self.expected[path].shape
        first, *rest = place if isinstance(place, tuple) and place else (place,)
        if isinstance(first, bool) or not isinstance(first, int | np.integer) or not shape:
            return np.asarray(self._slices(path, [blocks.whole(shape)], None)[0][place])
        layer = range(shape[0])[first]  # from the end where negative; IndexError beyond
        spans = ((layer, layer + 1), *blocks.whole(shape[1:]))
        return np.asarray(self._slices(path, [spans], None)[0][(0, *rest)])

    def _slices(self, path: str, wanted: Sequence[Spans], dtype: str | None) -> list[np.ndarray]:
        recorded = self.recorded[path] if self._verify else None
        check = blocks.checking(path, recorded, self._allow_nonfinite)
        with self._named():
            return self._files.slices(path, wanted, dtype or self.expected[path].dtype, check)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What goes wrong inside names the folder."""
        try:
            yield
        except StoreError as error:
            raise StoreError(f"{self.folder}: {error}") from error
