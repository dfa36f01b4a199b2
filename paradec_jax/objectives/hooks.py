"""Hooks of a run: its forecast, and the end of its time."""

import datetime
import time
from collections.abc import Mapping

import jax

from paradec_jax.objective import Metrics
from paradec_jax.train import Hook, TrainState
from paradec_jax.train.processes import texts_of_all


class Limit(Hook):
    """Ends the call at a time of `time.monotonic`, before its run is done.

    Several processes look at the time together, every ten updates.
    """

    def __init__(self, until: float) -> None:
        self._until = until

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        over = time.monotonic() > self._until
        return (
            over
            if jax.process_count() == 1
            else step % 10 == 0 and any(texts_of_all("over" * over))
        )


class Forecast(Hook):
    """Says once, after the first line of the log with a rate, how fast the part is and when it
    ends.
    """

    def __init__(self) -> None:
        self._done = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._done or "step_s" not in values or step == self.run.steps:
            return
        self._done = True
        left = datetime.timedelta(seconds=round((self.run.steps - step) * values["step_s"]))
        end = (datetime.datetime.now() + left).strftime("%Y-%m-%d %H:%M")
        rate = f"{values['tokens_per_s']:,.0f} tokens/s, " if "tokens_per_s" in values else ""
        flops = f"{values['flops_per_s'] / 1e12:.3g} TFLOP/s, " if "flops_per_s" in values else ""
        print(
            f"forecast: {rate}{flops}{values['step_s']:.3g} s an update, ends in {left} ({end})",
            flush=True,
        )
