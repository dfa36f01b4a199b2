"""What hooks log, evaluate and keep, and how signals end a run."""

import os
import signal
import time

import jax.numpy as jnp
import noisy_regression
import numpy as np
import pytest
from noisy_regression import STEPS, Batches, assert_same, hooks, lines_of, train

from paradec_jax.train import Evaluate, Hook, Log, NonFiniteLoss, Preempt, Preempted, Profile
from paradec_jax.train.hooks import SIGNALS


class Seen(Hook):
    """Keeps every line."""

    def __init__(self):
        self.lines = []

    def write(self, step, values):
        if values:
            self.lines.append({"step": step, **values})


@pytest.mark.slow
def test_lines_rates_evaluations_and_a_trace(tmp_path):
    seen = Seen()
    log = Log(tmp_path, every=3, flops=lambda batch, metrics: 7.0)
    evaluate = Evaluate(lambda state: {"copies": state.step}, every=5)
    train(None, Batches(delay=0.01), use=[log, seen, evaluate, Profile(tmp_path / "profile", 2, 3)])
    assert lines_of(tmp_path) == seen.lines
    steps = [(line["step"], line["eval/copies"]) for line in seen.lines if "eval/copies" in line]
    assert steps == [(5, 5), (10, 10), (12, 12)]
    first, *laps = [line for line in seen.lines if "loss" in line]
    assert first["compile_s"] > 0 and [line["step"] for line in laps] == [5, 6, 9, 10, 12]
    for line in laps:
        assert line["compile_s"] == 0 and line["step_s"] >= 0.01
        np.testing.assert_allclose(line["flops_per_s"] * line["step_s"], 7.0)
        np.testing.assert_allclose(line["tokens_per_s"] * line["step_s"], 12)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


class OfTwoShapes(Batches):
    """Batches of four rows, but from the sixth on every third has six."""

    def __next__(self):
        wide = self.position >= 5 and self.position % 3 == 2
        batch = super().__next__()
        return {name: np.tile(x, (2, 1))[:6] for name, x in batch.items()} if wide else batch


class Nested(OfTwoShapes):
    """The same batches beside some of one shape, as a loss of two parts takes them."""

    def __next__(self):
        return {"pairs": super().__next__(), "fresh": {"weights": np.ones((4, 2))}}


def test_every_shape_of_batch_compiles_apart_and_a_batch_may_hold_others(tmp_path):
    compiling = 0.4

    def slow(params, frozen, batch, key):
        time.sleep(compiling)  # while it is traced
        value, metrics = noisy_regression.loss(
            params, frozen, batch["pairs"] | {"step": batch["step"]}, key
        )
        return value * jnp.mean(batch["fresh"]["weights"]), metrics

    log = Log(
        tmp_path,
        every=3,
        flops=lambda batch, _: float(batch["pairs"]["tokens"].shape[0]),
    )
    train(None, Nested(), objective=slow, use=[log])
    lines = lines_of(tmp_path)
    compiled = [line["compile_s"] for line in lines]
    assert min(compiled[:2]) >= compiling and max(compiled[2:]) == 0  # updates 1 and 6 of 12
    assert all(line["step_s"] < compiling / 2 for line in lines)
    # Of updates 4 to 6 the last compiled and is in no rate; 9 and 12 have six rows.
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    np.testing.assert_allclose(tokens, [20, 20, 22, 22])
    rows = [line["flops_per_s"] * line["step_s"] for line in lines]
    np.testing.assert_allclose(rows, [4, 4, 14 / 3, 14 / 3])


def test_a_log_goes_on_without_duplicates(tmp_path, capsys):
    train(None, use=[Log(tmp_path, every=3)], steps=6)
    assert "step 3/6  loss " in capsys.readouterr().out
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    train(None, use=[Log(tmp_path, every=2)], steps=4)
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 4]


def test_without_a_checkpoint_a_bad_update_still_ends_the_call():
    with pytest.raises(NonFiniteLoss, match=r"update 1 had loss nan .*; there is no checkpoint"):
        train(None, Batches(bad=0))


class Interrupting(Batches):
    """Sends this process a signal while batch `at` is made."""

    def __init__(self, number: int, at: int):
        super().__init__()
        self.number, self.at = number, at

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == self.at:
            os.kill(os.getpid(), self.number)
        return super().__next__()


@pytest.fixture
def _terminal():
    """Python's own handlers: a background job of a shell, which tests may be, ignores SIGINT."""
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    former = [signal.signal(number, own) for number, own in zip(SIGNALS, defaults, strict=True)]
    yield
    for number, handler in zip(SIGNALS, former, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_the_update_under_way_and_the_run_goes_on(tmp_path, capsys, number):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(Preempted) as caught:
        train(tmp_path, Interrupting(number, 5))
    assert caught.value.code == 0 and (tmp_path / "checkpoints" / "6").is_dir()
    place = tmp_path.resolve() / "checkpoints" / "6"
    told = f"asked to end, saved update 6 as {place}: the same command goes on from there\n"
    assert capsys.readouterr().err == told
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    assert_same(train(tmp_path), train(None))


@pytest.mark.usefixtures("_terminal")
def test_the_second_interrupt_is_the_callers_and_without_a_hook_the_first():
    class Twice(Hook):
        def before(self, step):
            if step in (3, 4):
                os.kill(os.getpid(), signal.SIGINT)

        def after(self, step, state, metrics):
            return False

    class Deaf(Preempt):
        def after(self, step, state, metrics):
            assert super().after(step, state, metrics) == (step >= 3)
            return False

    for use in ([Deaf(), Twice()], [Twice()]):
        with pytest.raises(KeyboardInterrupt):
            train(None, use=use, steps=STEPS)
    assert hooks(None) == []
