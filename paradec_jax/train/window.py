"""What is logged of the updates since the last line: means, rates, and the first update that was not finite."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paradec_jax.train.checkpoint import Checkpoints
from paradec_jax.train.clock import Clock
from paradec_jax.train.step import Metrics

Shapes = Mapping[str, Any]  # as the batch, which may hold batches of its own
Flops = Callable[[Shapes, Mapping[str, float]], float]


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient of an update was NaN or infinite.

    Attributes:
      step: the update, counted from 1 as in the log.
      checkpoint: folder of the last checkpoint, saved before that update, or None.
    """

    def __init__(self, step: int, loss: float, grad_norm: float, checkpoint: Path | None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        super().__init__(
            f"update {step} had loss {loss} and gradient norm {grad_norm} and was not applied; {kept}"
        )
        self.step = step
        self.checkpoint = checkpoint


class Window:
    """Metrics since the last line of the log, left on the device until `flush`, and their rates.

    Args:
      clock: of the run.
      flops: operations of an update by the shapes of its batch and its metrics, or None where nobody counts them.
      peak_flops: operations a second of all devices together, or None where nobody knows.
    """

    def __init__(self, clock: Clock, flops: Flops | None = None, peak_flops: float | None = None) -> None:
        self._clock = clock
        self._pending: list[tuple[int, Metrics, Shapes | None]] = []  # None where the update compiled
        self._flops, self._peak = flops, peak_flops
        self._compiled: set[Any] = set()
        self._batch: Shapes | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Rates are those of the updates from now on."""
        self._since, self._elapsed = time.perf_counter(), 0.0

    def purpose(self, batch: Mapping[str, Any]) -> str:
        """What the clock is on while the update on a batch is handed out and taken: `compile` or `steps`.

        The first update on a batch of new shapes compiles. The one before it is waited for, so that what it took is
        its own.
        """
        dtypes = jax.tree.map(lambda x: x.dtype if hasattr(x, "dtype") else np.result_type(x), dict(batch))
        shapes = jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(np.shape(x), dtype), dict(batch), dtypes)
        leaves, tree = jax.tree.flatten(shapes)
        key = (tree, *leaves)
        if key in self._compiled:
            self._batch = shapes
            return "steps"
        self._compiled.add(key)
        self._batch = None
        if self._pending and self._pending[-1][2] is not None:
            jax.block_until_ready(self._pending[-1][1])
            self._elapsed += time.perf_counter() - self._since
        return "compile"

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the update; waits for those of one that compiled, which is not in the rates."""
        self._pending.append((step, metrics, self._batch))
        if self._batch is None:
            jax.block_until_ready(metrics)
            self._since = time.perf_counter()

    def flush(self, checkpoints: Checkpoints | None) -> dict[str, float]:
        """Means over the window, its rates, the clock's lap; raises NonFiniteLoss if an update was not applied."""
        fetched = jax.device_get([(step, metrics) for step, metrics, _ in self._pending])
        elapsed = self._elapsed + time.perf_counter() - self._since
        timed = [
            (shapes, metrics)
            for (_, metrics), (_, _, shapes) in zip(fetched, self._pending, strict=True)
            if shapes is not None
        ]
        self._pending = []
        for step, metrics in fetched:
            if not metrics["finite"]:
                saved = [checkpoints.path(s) for s in checkpoints.steps()] if checkpoints else []
                last = saved[-1] if saved else None
                raise NonFiniteLoss(step, float(metrics["loss"]), float(metrics["grad_norm"]), last)
        names = [name for name in fetched[0][1] if name != "finite"]
        line = {name: float(np.mean([m[name] for _, m in fetched], dtype=np.float64)) for name in names}
        return line | (self._rates(timed, elapsed) if timed else {}) | self._clock.lap()

    def _rates(self, timed: Sequence[tuple[Shapes, Mapping[str, Any]]], elapsed: float) -> dict[str, float]:
        found = {"step_s": elapsed / len(timed)}
        if tokens := sum(_tokens(shapes) for shapes, _ in timed):
            found["tokens_per_s"] = tokens / elapsed
        if self._flops is not None:
            told = [(shapes, {name: float(x) for name, x in metrics.items()}) for shapes, metrics in timed]
            found["flops_per_s"] = sum(self._flops(*update) for update in told) / elapsed
            if self._peak is not None:
                found["utilisation"] = found["flops_per_s"] / self._peak
        return found


def _tokens(shapes: Shapes) -> int:
    """Of a batch that holds others, those of all; 0 where nothing says how many a part has."""
    parts = [_tokens(part) for part in shapes.values() if isinstance(part, Mapping)]
    if parts:
        return sum(parts) if all(parts) else 0
    return next((math.prod(shapes[name].shape) for name in ("tokens", "weights") if name in shapes), 0)
