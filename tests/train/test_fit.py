"""The training loop: resumption to the bit, what another run is refused for, what survives when
things break.
"""

import logging
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from noisy_regression import (
    STEPS,
    Batches,
    assert_same,
    hooks,
    initial_params,
    lines_of,
    losses_of,
    python,
    sums,
    train,
)

from paradec_jax.io import hold
from paradec_jax.objective import Objective
from paradec_jax.train import (
    Checkpoint,
    Hook,
    NoneReadable,
    NonFiniteLoss,
    SaveFailed,
    TrainState,
    adamw,
    fit,
    make_train_step,
)

# When one array of a damaged checkpoint fails, Orbax leaves the other reads running; their late
# answers find its event loop closed, which Python reports as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, TrainState]:
    """An uninterrupted run, left alone by the tests."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def test_resume_after_an_exception_is_bitwise(tmp_path, whole):
    folder, expected = whole
    with pytest.raises(NonFiniteLoss, match=r"update 7 had loss nan .* the last good one is .*/4$"):
        train(tmp_path, Batches(bad=6))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]
    assert_same(train(tmp_path), expected)
    assert losses_of(tmp_path) == losses_of(folder)


def test_resume_after_sigkill_is_bitwise(tmp_path, whole):
    folder, expected = whole
    process = python(
        "noisy_regression", f"t.train(t.Path({str(tmp_path)!r}), t.Batches(delay=0.3))"
    )
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
    assert losses_of(tmp_path) == losses_of(folder)


def test_a_finished_run_returns_its_state(tmp_path, whole):
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert_same(train(tmp_path, Batches(bad=1)), whole[1])
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_hook_of_ten_lines_ends_the_call_and_the_next_goes_on(tmp_path, whole):
    seen = []

    class Early(Hook):
        def before(self, step):
            seen.append(step)

        def after(self, step, state, metrics):
            return step == 6

        def close(self):
            seen.append("closed")

    state = train(None, use=[*hooks(tmp_path), Early()])
    assert state.step == 6 and seen == [1, 2, 3, 4, 5, 6, "closed"]
    assert (tmp_path / "checkpoints" / "6").is_dir()
    assert_same(train(tmp_path), whole[1])


def test_a_step_of_ones_own(whole):
    """Any function of a state and a batch trains."""
    optimizer = adamw(1e-2, STEPS, warmup=3, cooldown=4)
    step = make_train_step(Objective(sums), optimizer, ema_decay=0.9)
    state = TrainState.create(initial_params(), optimizer, jax.random.key(1), ema=True)
    assert_same(fit(lambda *given: step(*given), state, Batches(), steps=STEPS), whole[1])


def test_the_state_is_given_away_and_the_parameters_are_not():
    params, optimizer = initial_params(), optax.sgd(0.1)
    state = TrainState.create(params, optimizer, jax.random.key(1))
    fit(make_train_step(Objective(sums), optimizer), state, Batches(), steps=1)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_shape_of_batch_is_traced_once():
    traced = chex.assert_max_traces(sums, n=1)
    train(None, objective=Objective(traced))


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of two updates that the tests do not change."""
    folder = tmp_path_factory.mktemp("begun")
    train(folder, steps=2, **RUN)
    return folder


def loss_with(scale: float) -> Objective:
    def scaled(params, frozen, batch, key):
        return {
            name: part._replace(total=part.total * scale)
            for name, part in sums(params, frozen, batch, key).items()
        }

    return Objective(scaled)


class Shifted(Batches):
    """Other data from the first batch on."""

    def __next__(self) -> dict[str, np.ndarray]:
        batch = super().__next__()
        return batch | {"inputs": batch["inputs"] + 1}


class Named(Batches):
    """The same data with a digest of its own."""

    digest = "another text"


RUN = {"objective": loss_with(2.0), "frozen": {"backbone": jnp.zeros(2)}}
OTHERS = {
    "steps": {"steps": 3},
    "arrays (params/embedding)": {"params": initial_params(hidden=6)},
    "loss (scale) [2.0 there, 3.0 here]": {"objective": loss_with(3.0)},
    "optimizer (peak) [0.01 there, 0.02 here]": {
        "optimizer": adamw(2e-2, STEPS, warmup=3, cooldown=4)
    },
    "optimizer (b2)": {"optimizer": adamw(1e-2, STEPS, warmup=3, cooldown=4, b2=0.9)},
    "data": {"data": Shifted()},
    "data (digest) [None there, another text here]": {"data": Named()},
    "key": {"key": 2},
    "frozen (backbone)": {"frozen": {"backbone": jnp.ones(2)}},
    "accumulate [1 there, 2 here]": {"accumulate": 2},
    "ema_decay [0.9 there, 0.8 here]": {"ema_decay": 0.8},
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_another_run_is_refused_in_one_sentence(begun, sentence):
    before = (begun / "run.json").read_text()
    with pytest.raises(ValueError, match="was begun with other") as caught:
        train(begun, **{"steps": 2} | RUN | OTHERS[sentence])
    assert f"other {sentence}" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert (begun / "run.json").read_text() == before


def test_what_is_allowed_is_the_run_from_then_on(tmp_path):
    train(tmp_path, steps=2)
    assert train(tmp_path, steps=3, of_hooks={"allow": ("steps",)}).step == 3
    with pytest.raises(ValueError, match=r"other steps \[3 there, 2 here\].* allow=\(.steps.,\)$"):
        train(tmp_path, steps=2)
    for allow in ("steps", ("stpes",)):
        with pytest.raises(ValueError, match=r"allow must hold names among .*, not "):
            Checkpoint(tmp_path, allow=allow)
    with pytest.raises(ValueError, match="the state has 3 updates, which is beyond steps=2"):
        train(tmp_path, steps=2, of_hooks={"allow": ("steps",)})


def test_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path):
    message = f"process .* is writing to {tmp_path}: wait"
    with hold(tmp_path), pytest.raises(OSError, match=message) as caught:
        train(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory: .*file/run"):
        train(tmp_path / "file" / "run")


def test_a_full_disk_keeps_the_checkpoints_and_the_same_call_goes_on(
    tmp_path, monkeypatch, whole, caplog, capsys
):
    save = ocp.CheckpointManager.save

    def full(self, step, **options):
        if step > 4:
            logging.getLogger("absl").error("what orbax says")
            sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
            raise ValueError(
                "RESOURCE_EXHAUSTED: Failed to write: No space left on device\nand more"
            )
        return save(self, step, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(
        SaveFailed, match=r"\(no space left on device\); those before it stay"
    ) as caught:
        train(tmp_path)
    assert isinstance(caught.value, OSError) and "\n" not in str(caught.value)
    assert not caplog.records and not capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4"]
    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    assert_same(train(tmp_path), whole[1])


def damage(folder: Path, how: str):
    """Halves or alters every file of the folder that is large enough to hold arrays or metadata."""
    for file in [f for f in folder.rglob("*") if f.is_file() and f.name != "_CHECKPOINT_METADATA"]:
        content = bytearray(file.read_bytes())
        if how == "half":
            content = content[: len(content) // 2]
        elif "state" in file.parts and "d" in file.parts and content:
            content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["half", "altered"])
def test_a_damaged_newest_checkpoint_falls_back(tmp_path, whole, how):
    train(tmp_path)
    newest = tmp_path / "checkpoints" / str(STEPS)
    damage(newest, how)
    with pytest.warns(RuntimeWarning, match="cannot read checkpoint") as caught:
        state = train(tmp_path)
    assert [str(newest) in str(w.message) for w in caught if "cannot read" in str(w.message)] == [
        True
    ]
    assert_same(state, whole[1])
    assert newest.with_name(f"{STEPS}.unreadable").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(tmp_path), whole[1])
    assert [step for step, _ in losses_of(tmp_path)] == [3, 4, 6, 8, 9, 12]
    for place in (tmp_path / "checkpoints").iterdir():
        damage(place, how)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(NoneReadable, match="none of the checkpoints in"),
    ):
        train(tmp_path)


class Short(Batches):
    """Two batches."""

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == 2:
            raise StopIteration
        return super().__next__()


def test_data_that_ends_and_grains_iterators(tmp_path, whole):
    with pytest.raises(ValueError, match="the data ended after 2 batches; steps is 12"):
        train(None, Short())
    grain = pytest.importorskip("grain")
    source = [next(batches) for batches in [Batches()] for _ in range(STEPS)]

    def data():
        return iter(grain.MapDataset.source(source).to_iter_dataset())

    with pytest.raises(ValueError, match="the data ended after 12 batches"):
        train(tmp_path, data(), steps=STEPS + 4)
    (tmp_path / "checkpoints" / "12").rename(tmp_path / "lost")
    assert_same(train(tmp_path, data(), of_hooks={"allow": ("steps",)}), whole[1])
    assert [line["step"] for line in lines_of(tmp_path)][-1] == STEPS
