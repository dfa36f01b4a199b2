"""Signals that ask a run to end: it saves first, and the same command goes on."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SERVICE = "jax_enable_preemption_service"


class Preempted(SystemExit):
    """The run was asked to end and saved; left alone, it ends the process with code 0.

    It is an exit and no return, so that no caller takes the state for that of a finished run.

    Attributes:
      step: updates applied, all of them saved.
      checkpoint: their checkpoint.
    """

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(0)
        self.step = step
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"asked to end, saved update {self.step} as {self.checkpoint}: the same command goes on from there"


def leave(step: int, checkpoint: Path, primary: bool) -> NoReturn:
    """Says that the run was saved, in one sentence on standard error, and raises Preempted."""
    ended = Preempted(step, checkpoint)
    if primary:
        print(ended, file=sys.stderr, flush=True)
    raise ended


class Preemption:
    """Notices SIGTERM and the first SIGINT within its block, and gives the caller's handlers back after it.

    A second SIGINT is the caller's again, as a rule a KeyboardInterrupt. In a thread that is not the main one nothing
    is noticed, since Python takes signals in the main thread alone; what the process ignores, as under nohup, stays
    ignored. After `jax.distributed.initialize` JAX's own service notices SIGTERM and finds the update at which all
    processes stop; SIGINT is handed on to it.

    Args:
      active: whether anything is noticed at all.
    """

    def __init__(self, active: bool = True) -> None:
        self._active, self._noticed = active, False
        self._former: dict[int, Any] = {}
        self._together = jax.distributed.is_initialized() and getattr(jax.config, SERVICE, True)

    def __enter__(self) -> "Preemption":
        if self._together or jax.process_count() > 1:
            numbers: tuple[signal.Signals, ...] = (signal.SIGINT,) if self._together else ()
        else:
            numbers = SIGNALS
        if self._active and threading.current_thread() is threading.main_thread():
            for number in numbers:
                former = signal.getsignal(number)
                # None is a handler that Python does not know; a background job of a shell is to ignore SIGINT.
                if former not in (None, signal.SIG_IGN):
                    self._former[number] = former
                    signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def reached(self, step: int) -> bool:
        """Whether to save and end after this update; to be asked after every one, with the same steps everywhere."""
        if self._active and self._together:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._noticed

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        if number == signal.SIGINT:
            signal.signal(number, self._former[number])
            if self._together:
                os.kill(os.getpid(), signal.SIGTERM)
