"""The folder of a run: who holds it, its checkpoints, and whether it is the run that it says it is."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paradec_jax.train.agree import all_or_none
from paradec_jax.train.checkpoint import Checkpoints
from paradec_jax.train.holder import held
from paradec_jax.train.identity import compare, record
from paradec_jax.train.iterator import DataIterator
from paradec_jax.train.share import check_shared, clear_probes
from paradec_jax.train.state import TrainState


class RunFolder:
    """The folder of a run, held by one process, with `checkpoints/`, `metrics.jsonl` and `run.json`.

    Args:
      folder: made if missing.
      keep: checkpoints to keep.
      primary: whether this process is the one that writes.

    Attributes:
      checkpoints: of the run, open within the block.
      newest: update of the newest checkpoint at the beginning of the block, or None.
    """

    def __init__(self, folder: Path, keep: int, primary: bool) -> None:
        self.folder, self._keep, self._primary = folder, keep, primary
        self._stack = contextlib.ExitStack()
        self._run: Mapping[str, Any] = {}
        self._computed: list[dict[str, Any]] = []

    def __enter__(self) -> "RunFolder":
        with contextlib.ExitStack() as stack:
            with all_or_none():
                if self._primary:
                    stack.enter_context(held(self.folder))
                    clear_probes(self.folder)
            check_shared(self.folder)
            self.checkpoints = stack.enter_context(Checkpoints(self.folder / "checkpoints", self._keep))
            found = self.checkpoints.steps()
            self.newest = found[-1] if found else None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def log(self) -> Path:
        """Of the JSON lines."""
        return self.folder / "metrics.jsonl"

    def compare(self, run: Mapping[str, Any], resume: bool, allow: Collection[str]) -> None:
        """Refuses, with a ValueError, to go on with another run, or at all where `resume` is false."""
        if self.newest is not None and not resume:
            where = self.checkpoints.folder
            raise ValueError(f"{where} has checkpoints and resume is false; choose another folder")
        self._run = run
        self._computed = [] if self.newest is None else compare(self.folder, run, allow)

    def restore(self, shape: TrainState, data: DataIterator, steps: int) -> TrainState:
        """The state of the newest readable checkpoint; puts the data where it stood."""
        state, data_state = self.checkpoints.restore(shape)
        if int(state.step) > steps:
            raise ValueError(f"{self.checkpoints.path(int(state.step))} is beyond steps={steps}")
        with all_or_none():  # an iterator may go back to files that one process alone has lost
            data.set_state(data_state)
        return state

    def record(self, update: int, mesh: dict[str, int] | None = None) -> None:
        """Writes `run.json` before this update, the first of the call, which is computed on a mesh of such axes."""
        if self._primary:
            record(self.folder, self._run, self._computed, update, mesh)
