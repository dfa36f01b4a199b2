"""The end of a call's time."""

import time

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
        over, due = time.monotonic() > self._until, jax.process_count() == 1 or step % 10 == 0
        return due and any(texts_of_all("over" * over))
