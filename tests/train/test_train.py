"""The training loop: resumption to the bit, what survives when things break, what is logged."""

import json
import signal
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from noisy_regression import STEPS, Batches, python, train

from paradec_jax.train import NonFiniteLoss, TrainState
from paradec_jax.train.log import Log

# When one array of a damaged checkpoint fails, Orbax leaves the other reads running; their late answers find
# its event loop closed, which Python reports as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def assert_same(a: TrainState, b: TrainState) -> None:
    for state in (a, b):
        assert state.step == STEPS
    jax.tree.map(
        np.testing.assert_array_equal, *(s.__dict__ | {"key": jax.random.key_data(s.key)} for s in (a, b))
    )


def log_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_by_step(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in log_lines(folder) if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, TrainState]:
    """An uninterrupted run, left alone by the tests."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def test_resume_after_an_exception_is_bitwise(tmp_path, whole):
    folder, expected = whole
    with pytest.raises(NonFiniteLoss):
        train(tmp_path, Batches(bad=6))
    assert_same(train(tmp_path), expected)
    assert losses_by_step(tmp_path) == losses_by_step(folder)


def test_resume_after_sigkill_is_bitwise(tmp_path, whole):
    folder, expected = whole
    process = python("noisy_regression", f"t.train(t.Path({str(tmp_path)!r}), t.Batches(delay=0.3))")
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoints" / "4").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "checkpoints" / str(STEPS)).exists()
    assert_same(train(tmp_path), expected)
    assert losses_by_step(tmp_path) == losses_by_step(folder)


def test_finished_run_returns_its_state(tmp_path, whole):
    _, expected = whole
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert_same(train(tmp_path, Batches(bad=1)), expected)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def damage(folder: Path, how: str) -> None:
    """Halves, clears or alters every file of the folder that is large enough to hold arrays or metadata."""
    for file in [f for f in folder.rglob("*") if f.is_file() and f.name != "_CHECKPOINT_METADATA"]:
        content = bytearray(file.read_bytes())
        if how == "half":
            content = content[: len(content) // 2]
        elif how == "empty":
            content = b""
        elif "state" in file.parts and "d" in file.parts and content:
            content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["half", "empty", "altered"])
def test_damaged_newest_checkpoint_falls_back(tmp_path, whole, how):
    _, expected = whole
    train(tmp_path)
    newest = tmp_path / "checkpoints" / str(STEPS)
    damage(newest, how)
    with pytest.warns(RuntimeWarning, match="cannot read checkpoint") as caught:
        state = train(tmp_path)
    assert [str(newest) in str(w.message) for w in caught if "cannot read" in str(w.message)] == [True]
    assert_same(state, expected)
    assert newest.with_name(f"{STEPS}.unreadable").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(tmp_path), expected)
    assert [step for step, _ in losses_by_step(tmp_path)] == [3, 4, 6, 8, 9, 12]


def test_checkpoint_of_another_model_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(ValueError, match=r"another ema: ema/embedding is .* there and missing in this run"):
        train(tmp_path, ema_decay=None, allow=("ema_decay",))
    with pytest.raises(ValueError, match="resume is false"):
        train(tmp_path, resume=False)
    with pytest.raises(ValueError, match="is beyond steps=8"):
        train(tmp_path, steps=8, allow=("steps",))


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(
        NonFiniteLoss, match=r"update 7 had loss nan .* last good checkpoint is .*/4"
    ) as caught:
        train(tmp_path, Batches(bad=6), log_every=100)
    assert caught.value.step == 7
    assert caught.value.checkpoint == (tmp_path / "checkpoints" / "4").resolve()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]
    with pytest.raises(NonFiniteLoss, match="there is no checkpoint"):
        train(None, Batches(bad=0))


def test_log_resumes_without_duplicates(tmp_path, capsys):
    path = tmp_path / "run" / "metrics.jsonl"
    with Log(path, step=0, steps=9) as log:
        for step in (2, 4, 6):
            log.write(step, {"loss": step / 2, "tokens_per_s": 1500.0, "step_s": 60.0})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    with Log(path, step=4, steps=9) as log:
        log.write(6, {"loss": float("inf")})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 1.0), (4, 2.0), (6, None)]
    assert "step 4/9  loss 2  1,500 tokens/s  ETA 0:05:00\n" in capsys.readouterr().out


def test_fit_logs_evaluations_and_rates(tmp_path):
    train(tmp_path, evaluate=lambda state: {"copies": state.step}, evaluate_every=5)
    lines = log_lines(tmp_path)
    assert [(line["step"], line["eval/copies"]) for line in lines if "eval/copies" in line] == [
        (5, 5),
        (10, 10),
        (12, 12),
    ]
    first, second, *_ = (line for line in lines if "loss" in line)
    assert first["seconds/compile"] > 0 and second["seconds/compile"] == 0
    np.testing.assert_allclose(second["tokens_per_s"] * second["step_s"], 12)
    with pytest.raises(ValueError, match="the data ended after 2 batches"):
        train(None, data=Short())


class Short(Batches):
    """Two batches."""

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == 2:
            raise StopIteration
        return super().__next__()


def test_grain_iterator_resumes(tmp_path, whole):
    grain = pytest.importorskip("grain")
    source = [next(batches) for batches in [Batches()] for _ in range(STEPS)]

    def data():
        return iter(grain.MapDataset.source(source).to_iter_dataset())

    with pytest.raises(ValueError, match="the data ended after 12 batches"):
        train(tmp_path, data(), steps=STEPS + 4)
    (tmp_path / "checkpoints" / "12").rename(tmp_path / "lost")
    assert_same(train(tmp_path, data(), allow=("steps",)), whole[1])
