"""What is logged of the updates since the last line: means, rates, and the first update that was not finite."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paradec_jax.train.checkpoint import Checkpoints
from paradec_jax.train.clock import Clock
from paradec_jax.train.step import Metrics


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
      flops: operations of an update on a batch, or None where nobody counts them.
    """

    def __init__(self, clock: Clock, flops: Callable[[Any], float] | None = None) -> None:
        self._clock = clock
        self._pending: list[tuple[int, Metrics]] = []
        self._flops_of = flops
        self._compiled = False
        self.restart_clock()

    @property
    def purpose(self) -> str:
        """What the clock is on while the next update is handed out and taken: `compile` or `steps`."""
        return "steps" if self._compiled else "compile"

    def restart_clock(self) -> None:
        """Rates are those of the updates from now on."""
        self._start, self._timed, self._tokens, self._flops = time.perf_counter(), 0, 0, 0.0

    def add(self, step: int, metrics: Metrics, batch: Mapping[str, Any]) -> None:
        """Takes the metrics of an update; waits for those of the first, which compiled and is not in the rates."""
        self._pending.append((step, metrics))
        if not self._compiled:
            jax.block_until_ready(metrics)
            self._compiled = True
            self.restart_clock()
            return
        self._timed += 1
        self._tokens += next((np.size(batch[name]) for name in ("tokens", "weights") if name in batch), 0)
        if self._flops_of is not None:
            self._flops += self._flops_of(batch)

    def flush(self, checkpoints: Checkpoints | None) -> dict[str, float]:
        """Means over the window, its rates, the clock's lap; raises NonFiniteLoss if an update was not applied."""
        fetched = jax.device_get(self._pending)
        elapsed = time.perf_counter() - self._start
        self._pending = []
        for step, metrics in fetched:
            if not metrics["finite"]:
                saved = [checkpoints.path(s) for s in checkpoints.steps()] if checkpoints else []
                last = saved[-1] if saved else None
                raise NonFiniteLoss(step, float(metrics["loss"]), float(metrics["grad_norm"]), last)
        names = [name for name in fetched[0][1] if name != "finite"]
        line = {name: float(np.mean([m[name] for _, m in fetched], dtype=np.float64)) for name in names}
        if self._timed:
            line["step_s"] = elapsed / self._timed
            if self._tokens:
                line["tokens_per_s"] = self._tokens / elapsed
            if self._flops_of is not None:
                line["flops_per_s"] = self._flops / elapsed
        return line | self._clock.lap()
