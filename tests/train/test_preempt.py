"""A run that is asked to end saves first, and the caller's handlers come back."""

import os
import signal

import jax
import numpy as np
import pytest
from noisy_regression import Batches, train

from paradec_jax.train import Preempted
from paradec_jax.train.preempt import SIGNALS, Preemption


class Interrupting(Batches):
    """Sends this process a signal while batch `at` is made."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__()
        self.number, self.at = number, at

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == self.at:
            os.kill(os.getpid(), self.number)
        return super().__next__()


@pytest.fixture(autouse=True)
def _terminal():
    """Python's own handlers: a background job of a shell, which tests may be, ignores SIGINT."""
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    former = [signal.signal(number, own) for number, own in zip(SIGNALS, defaults, strict=True)]
    yield
    for number, handler in zip(SIGNALS, former, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_it_saves_after_the_update_under_way_and_goes_on(tmp_path, capsys, number):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(Preempted, match=r"asked to end, saved update 6 as .*/6: the same command") as caught:
        train(tmp_path, Interrupting(number, 5))
    assert caught.value.code == 0 and caught.value.step == 6 and caught.value.checkpoint.is_dir()
    assert capsys.readouterr().err == f"{caught.value}\n"
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    jax.tree.map(np.testing.assert_array_equal, train(tmp_path).params, train(None).params)


def test_without_a_folder_signals_are_the_callers():
    with pytest.raises(KeyboardInterrupt):
        train(None, Interrupting(signal.SIGINT, 1))


def test_the_second_interrupt_is_the_callers():
    with Preemption() as signals:
        assert not signals.reached(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.reached(2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
