"""A trace of some updates of a run."""

from pathlib import Path
from typing import Any

import jax

from paradec_jax.train.clock import Clock


class Profile:
    """Keeps a trace of updates `first` to `last`, those of them that this call applies, in FOLDER/profile.

    The trace is that of `jax.profiler`, which TensorBoard, XProf and Perfetto show.

    Args:
      folder: of the run.
      updates: (first, last), counted from 1; None keeps none.
      clock: of the run, whose `log` starting and writing the trace are.
      primary: whether this process is the one that keeps it.

    Raises:
      ValueError: updates that are no range, or a run without a folder.
    """

    def __init__(
        self, folder: Path | None, updates: tuple[int, int] | None, clock: Clock, primary: bool = True
    ) -> None:
        if updates is not None and not 1 <= updates[0] <= updates[1]:
            raise ValueError(f"profile must be (first, last) with 1 <= first <= last, not {updates}")
        if updates is not None and folder is None:
            raise ValueError("profile keeps a trace in the run's folder: give a folder")
        self._folder, self._updates, self._clock = folder, updates if primary else None, clock
        self._running = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, step: int) -> None:
        """Starts the trace where `step` is one of the updates."""
        if self._updates is None or self._folder is None or self._running:
            return
        if self._updates[0] <= step <= self._updates[1]:
            with self._clock.on("log"):
                jax.profiler.start_trace(str(self._folder / "profile"))
            self._running = True

    def end(self, step: int, result: Any) -> None:
        """Ends the trace after the last of the updates, once the device has its result."""
        if self._running and self._updates is not None and step >= self._updates[1]:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            with self._clock.on("log"):
                jax.profiler.stop_trace()
