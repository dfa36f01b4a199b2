"""Metrics of a run: JSON lines on disk, and a progress bar or plain lines on the terminal."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paradec_jax.io import atomic_write_text
from paradec_jax.train.clock import Clock
from paradec_jax.train.writers import Writer


class Log:
    """Appends one JSON object a line, `{"step": n, ...}`, each flushed as it is written.

    Opening drops the lines of steps beyond `step`, and a line cut short by a kill, so that a resumed run
    repeats none. Numbers that are not finite are written as null.

    Args:
      path: file of the JSON lines, or None for none.
      step: updates already applied, 0 for a new run.
      steps: updates of the whole run.
      progress: whether to show a bar (on a terminal) or lines (elsewhere).
      primary: whether this process is the one that writes.
      writers: called with the step and the metrics of every line, as they are.
      clock: of the run, whose `log` writing and showing are; one of its own when None.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        step: int,
        steps: int,
        progress: bool = True,
        primary: bool = True,
        writers: Sequence[Writer] = (),
        clock: Clock | None = None,
    ) -> None:
        self._clock = Clock() if clock is None else clock
        self._steps, self._path = steps, path
        self._writers = tuple(writers) if primary else ()
        self._file = None
        if path is not None and primary:
            _truncate(Path(path), step)
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        console = Console()
        self._plain = progress and primary and not console.is_terminal
        self._bar = None
        if progress and primary and console.is_terminal:
            count, text = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}")
            self._bar = Progress(count, BarColumn(), text, console=console)
            self._task = self._bar.add_task("compiling", total=steps, completed=step)
            self._bar.start()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes and shows metrics after `step` updates; `step_s`, seconds an update, gives the ETA.

        Raises:
          OSError: the line could not be written.
        """
        with self._clock.on("log"):
            self._append(step, metrics)
            for writer in self._writers:
                writer(step, metrics)
            self._show(step, metrics)

    def _append(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step} | finite) + "\n")
            self._file.flush()
        except OSError as error:
            told = f"a line could not be written to {self._path} ({error.strerror}); the checkpoints stay"
            raise OSError(told) from error

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        text = _summary(metrics, self._steps - step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        if self._plain:
            print(f"step {step}/{self._steps}  {text}", flush=True)

    def close(self) -> None:
        """Closes the file and the bar."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a line that was refused before
                self._file.close()
        if self._bar is not None:
            self._bar.stop()


def _summary(metrics: Mapping[str, float], steps_left: int) -> str:
    shown = [name for name in metrics if name == "loss" or name.startswith("eval/")]
    parts = [f"{name} {metrics[name]:.4g}" for name in shown]
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if "utilisation" in metrics:
        parts.append(f"{metrics['utilisation']:.1%} of peak")
    if "step_s" in metrics:
        parts.append(f"ETA {timedelta(seconds=round(steps_left * metrics['step_s']))}")
    if "wall_s" in metrics:
        spent = {
            name.partition("/")[2]: s for name, s in metrics.items() if name.startswith("total_seconds/")
        }
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())
        parts.append(f"{metrics['wall_s']:.1f} s: {told}")
    return "  ".join(parts)


def _truncate(path: Path, step: int) -> None:
    """Rewrites the file without lines beyond `step` or cut short; atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            keep = False
        if keep:
            kept.append(line + "\n")
    atomic_write_text(path, "".join(kept))
