"""Where the wall time of a run goes."""

import contextlib
import time
from collections.abc import Iterator

PURPOSES = ("restore", "data", "compile", "steps", "evaluate", "save", "log")


class Clock:
    """A clock of the host whose every nanosecond belongs to one purpose, so that these sum to the wall time.

    Purposes, in seconds that the host worked or waited: `restore` (all before the first batch is asked for: making
    the state or reading it, comparing `run.json`), `data` (for batches), `compile` (up to the result of the first
    update of each shape of batch), `steps` (handing out updates, and waiting for them where a line of the log needs
    their values, or an update compiles after them), `evaluate`, `save` (until the state is the host's, or the save
    before it done) and `log` (lines, writers, the trace). The device works on while the host waits for data: a share
    of `data` costs nothing while `steps` is not small.

    Args:
      purpose: what the time belongs to from now on.
    """

    def __init__(self, purpose: str = "restore") -> None:
        self._purpose = purpose
        self._total = dict.fromkeys(PURPOSES, 0)
        self._before = dict(self._total)
        self._since = time.perf_counter_ns()

    def switch(self, purpose: str) -> str:
        """From now on the time belongs to this purpose; returns the one that it belonged to."""
        now, before = time.perf_counter_ns(), self._purpose
        self._total[before] += now - self._since
        self._since, self._purpose = now, purpose
        return before

    @contextlib.contextmanager
    def on(self, purpose: str) -> Iterator[None]:
        """The time of the block belongs to this purpose, but for what inner blocks take."""
        outer = self.switch(purpose)
        try:
            yield
        finally:
            self.switch(outer)

    def lap(self) -> dict[str, float]:
        """Seconds of each purpose since the lap before, as `seconds/PURPOSE`."""
        self.switch(self._purpose)
        lap = {f"seconds/{name}": (self._total[name] - self._before[name]) / 1e9 for name in PURPOSES}
        self._before = dict(self._total)
        return lap

    def total(self) -> dict[str, float]:
        """Seconds of each purpose since the beginning, as `total_seconds/PURPOSE`, and their sum, `wall_s`."""
        self.switch(self._purpose)
        total = {f"total_seconds/{name}": self._total[name] / 1e9 for name in PURPOSES}
        return {"wall_s": sum(self._total.values()) / 1e9} | total
