"""Hooks that log a run, evaluate it, end it on a signal, or keep a trace of it."""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from paradec_jax.io import atomic_write_text
from paradec_jax.objective import Metrics
from paradec_jax.train.loop import Call, Hook
from paradec_jax.train.processes import all_or_none, texts_of_all
from paradec_jax.train.step import TrainState

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Log(Hook):
    """Means of the metrics every so many updates, with rates.

    A line has `step`, the means since the line before, `step_s` (seconds an update, data included)
    and `tokens_per_s` (of `batch["tokens"]`, `batch["weights"]` or pairs of blocks, with padding).
    Updates on the first batch of a shape
    compile: they took `compile_s` and are in no rate. A resumed run drops the lines after its
      checkpoint.

    Args:
      folder: folder of `metrics.jsonl`, one JSON object a line, or None; numbers that are not
        finite are null.
      every: updates between lines.
      flops: operations of an update by the shapes of its batch and its metrics, such as
        `models.batch_flops`; lines then have `flops_per_s`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        every: int = 100,
        flops: Callable[[Any, Mapping[str, float]], float] | None = None,
    ) -> None:
        self.path = None if folder is None else Path(folder) / "metrics.jsonl"
        self.every, self.flops = every, flops
        self._file: TextIO | None = None
        # Metrics of an update, and shapes of its batch; None where it compiled.
        self._updates: list[tuple[Metrics, Any]] = []
        self._since = self._compile_s = 0.0

    def before(self, step: int) -> None:
        if self.path is not None and self._file is None and jax.process_index() == 0:
            truncate(self.path, step - 1)
            self._file = self.path.open("a", encoding="utf-8")
        if not self._updates:  # what other hooks did since the last line is in no rate
            self._since, self._compile_s = time.perf_counter(), self.run.compile_s

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        self._updates.append((metrics, None if self.run.compiles else self.run.shapes))
        if step % self.every == 0 or step == self.run.steps:
            self._means(step)
        return False

    def end(self, step: int, state: TrainState) -> None:
        self._means(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._means(step)  # first the line of the updates so far
        if self._file is not None and values:
            finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
            self._file.write(json.dumps({"step": step} | finite) + "\n")
            self._file.flush()
        shown = "".join(
            f"  {name} {value:.4g}"
            for name, value in values.items()
            if name in ("loss", "tokens_per_s") or name.startswith("eval/")
        )
        if shown:
            left = timedelta(seconds=round((self.run.steps - step) * values.get("step_s", 0)))
            print(f"step {step}/{self.run.steps}{shown}  ETA {left}", flush=True)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a line that was refused before
                self._file.close()
        self._file, self._updates = None, []

    def _means(self, step: int) -> None:
        """Writes the means since the last line, if there were updates."""
        if not self._updates:
            return
        self.run.check()
        compile_s = self.run.compile_s - self._compile_s
        elapsed = time.perf_counter() - self._since - compile_s
        updates, self._updates = self._updates, []
        numbers: list[Metrics] = jax.device_get([metrics for metrics, _ in updates])
        line = {
            name: float(np.mean([m[name] for m in numbers], dtype=float))
            for name in numbers[0]
            if name != "finite"
        }
        timed = [
            (shapes, m)
            for (_, shapes), m in zip(updates, numbers, strict=True)
            if shapes is not None
        ]
        if timed:
            line["step_s"] = elapsed / len(timed)
        if count := sum(tokens(shapes) for shapes, _ in timed):
            line["tokens_per_s"] = count / elapsed
        if timed and self.flops is not None:
            done = sum(
                self.flops(shapes, {name: float(x) for name, x in m.items()}) for shapes, m in timed
            )
            line["flops_per_s"] = done / elapsed
        self.run.write(step, line | {"compile_s": compile_s})


def tokens(shapes: Mapping[str, Any]) -> int:
    """Positions of a batch; of one that holds others the sum, and 0 where one of them does not
    tell.
    """
    parts = [tokens(part) for part in shapes.values() if isinstance(part, Mapping)]
    if parts:
        return sum(parts) if all(parts) else 0
    kinds = ("tokens",), ("weights",), ("prompt", "noisy", "clean")  # the last of pairs of blocks
    names = next((kind for kind in kinds if kind[-1] in shapes), ())
    return sum(math.prod(shapes[name].shape) for name in names)


def truncate(path: Path, step: int) -> None:
    """Rewrites a log, no link to one, without lines beyond `step` or cut short; makes its folder.
    Raises OSError.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link, which no log is written over")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(Exception):
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
    atomic_write_text(path, "".join(lines))


class Evaluate(Hook):
    """Logs numbers of the state, as `eval/NAME`, every so many updates and after the last one.

    The function must not keep the state, whose arrays the next update takes.
    """

    def __init__(
        self, function: Callable[[TrainState], Mapping[str, float]], *, every: int = 1000
    ) -> None:
        self.function, self.every = function, every

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        if step % self.every == 0 or step == self.run.steps:
            self.run.check()  # of all processes, before they wait for one another below
            self.run.write(step, {})  # the log's rates end here
            with all_or_none():
                values = {
                    f"eval/{name}": float(value) for name, value in self.function(state).items()
                }
            self.run.write(step, values)
        return False


class Preempt(Hook):
    """Ends the call after the update under way on SIGTERM or the first SIGINT; `fit` then raises
    `Preempted`.

    A `Checkpoint` before it saves that update. A second SIGINT is the caller's, and so are signals
    after the call. What the process ignores, as under nohup, stays ignored; threads but the main
    one notice nothing. Over processes JAX's own service notices SIGTERM and finds the update at
    which all stop; SIGINT is handed on to it.
    """

    def __init__(self) -> None:
        self._noticed = self._together = False
        self._former: dict[int, Any] = {}

    def begin(self, run: Call, state: TrainState) -> TrainState:
        self._together, self._noticed = jax.distributed.is_initialized(), False
        for number in (signal.SIGINT,) if self._together else SIGNALS:
            # None is a handler that Python does not know; a background job of a shell is to ignore
            # SIGINT.
            ours = signal.getsignal(number) not in (None, signal.SIG_IGN)
            if ours and threading.current_thread() is threading.main_thread():
                self._former[number] = signal.signal(number, self._notice)
        return super().begin(run, state)

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        if self._together:
            self._noticed = multihost_utils.reached_preemption_sync_point(step)
        return self._noticed

    def end(self, step: int, state: TrainState) -> None:
        if self._noticed:
            if self.run.saved is not None and jax.process_index() == 0:
                saved = f"asked to end, saved update {step} as {self.run.saved}"
                print(f"{saved}: the same command goes on from there", file=sys.stderr, flush=True)
            raise Preempted(0)

    def close(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        if number == signal.SIGINT:
            signal.signal(number, self._former[number])
            if self._together:
                os.kill(os.getpid(), signal.SIGTERM)


class Preempted(SystemExit):
    """A run was asked to end and did. An exit with code 0, so that nobody takes its state for a
    finished one.
    """


class Limit(Hook):
    """Ends the call at a time of `time.monotonic`, before its run is done.

    Several processes look at the time together, every ten updates.
    """

    def __init__(self, until: float) -> None:
        self._until = until

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        over, due = time.monotonic() > self._until, jax.process_count() == 1 or step % 10 == 0
        return due and any(texts_of_all("over" * over))


class Profile(Hook):
    """Keeps a trace of updates `first` to `last` in a folder, on process 0: for TensorBoard, XProf
    and Perfetto.
    """

    def __init__(self, folder: str | Path, first: int, last: int) -> None:
        self.folder, self.first, self.last = str(folder), first, last
        self._running = False

    def before(self, step: int) -> None:
        if not self._running and self.first <= step <= self.last and jax.process_index() == 0:
            jax.profiler.start_trace(self.folder)
            self._running = True

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        if self._running and step >= self.last:
            jax.block_until_ready(metrics)
            self.close()
        return False

    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
