"""The folder of a run: one holder, the run that it says it is, room that ends."""

import json
import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from noisy_regression import STEPS, Batches, initial_params, loss, train

from paradec_jax.train import FolderHeld, SaveFailed, TrainState, adamw, fit, share
from paradec_jax.train.holder import held
from paradec_jax.train.identity import NAMES, identity
from paradec_jax.train.log import Log


class Shifted(Batches):
    """Other data from the first batch on."""

    def __next__(self) -> dict[str, np.ndarray]:
        batch = super().__next__()
        return batch | {"inputs": batch["inputs"] + 1}


class Named(Batches):
    """The same data with a digest of its own."""

    digest = "another text"


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of two updates that the tests do not change."""
    folder = tmp_path_factory.mktemp("begun")
    train(folder, steps=2)
    return folder


def test_a_second_call_is_refused_and_told_who_holds_the_folder(tmp_path):
    with held(tmp_path):
        with pytest.raises(
            FolderHeld, match=f"process {os.getpid()} on .* is writing to {tmp_path}"
        ) as caught:
            train(tmp_path)
        assert "\n" not in str(caught.value) and not (tmp_path / "checkpoints").exists()
    with held(tmp_path):
        pass


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    read, write = os.pipe()
    with held(tmp_path):
        if not (child := os.fork()):
            os.write(write, b"!")
            time.sleep(60)
            os._exit(0)
    try:
        os.read(read, 1)
        with held(tmp_path):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written_is_refused_before_any_batch(tmp_path):
    (tmp_path / "file").write_text("")
    data = Batches()
    with pytest.raises(OSError, match=r"file/run cannot be written \(Not a directory\)"):
        train(tmp_path / "file" / "run", data)
    assert data.position == 0


def test_a_folder_that_one_process_cannot_write_is_refused(tmp_path, monkeypatch):
    """As process 1 of two: the second folder shows what process 0 wrote, and takes nothing."""
    heard = []

    def texts_of_all(text):
        heard.append(text)
        return ["status" if len(heard) == 1 else "", text]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(share, "texts_of_all", texts_of_all)
    (tmp_path / "status").touch()
    share.check_shared(tmp_path)
    assert heard[0].startswith(".seen.") and heard[1:] == [""]
    assert [path.name for path in tmp_path.iterdir()] == ["status"]
    if not Path("/proc/self/status").exists():
        pytest.skip("no folder that nobody can write")
    heard.clear()
    with pytest.raises(OSError, match=r"^process 1 cannot write /proc/self \(.*\): choose another folder$"):
        share.check_shared(Path("/proc/self"))


def test_what_a_killed_process_left_goes_with_the_next_run(tmp_path):
    left = tmp_path / f".seen.{'0' * 32}"
    left.touch()
    train(tmp_path, steps=1)
    assert not left.exists()


@pytest.mark.parametrize(
    ("name", "data", "changes"),
    [
        ("steps", None, {"steps": 3}),
        ("accumulate", None, {"accumulate": 2}),
        ("ema_decay", None, {"ema_decay": 0.8}),
        ("ema_warmup", None, {"ema_warmup": False}),
        ("optimizer", None, {"optimizer": adamw(2e-2, STEPS, warmup=3, cooldown=4)}),
        ("optimizer", None, {"optimizer": optax.sgd(0.1)}),
        ("data", Shifted(), {}),
        ("data", Named(), {}),
        ("key", None, {"key": jax.random.key(2)}),
        ("frozen", None, {"frozen": jnp.ones(2)}),
        ("recipe", None, {"recipe": {"window": 4}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_is_refused_in_one_sentence(begun, name, data, changes):
    before = (begun / "run.json").read_text()
    with pytest.raises(ValueError, match=rf"was begun with other {name}.* allow=\(.{name}.,\)$") as caught:
        train(begun, data, **{"steps": 2} | changes)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert (begun / "run.json").read_text() == before


def test_other_parameters_are_refused(begun):
    shape = TrainState.shape(initial_params() | {"more": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0))
    settings = {"steps": 2, "accumulate": 1, "ema_decay": None, "ema_warmup": True, "rounds": None}
    found = identity(shape, optax.sgd(0.1), Batches(), jax.random.key(0), **settings)
    told = json.loads((begun / "run.json").read_text())["run"]
    assert tuple(found) == tuple(told) == NAMES and json.loads(json.dumps(found)) == found
    assert found["parameters"].keys() - told["parameters"].keys() == {"more"}


def test_what_is_allowed_is_the_run_from_then_on(tmp_path):
    train(tmp_path, steps=2)
    state = train(tmp_path, steps=3, allow=("steps",))
    assert state.step == 3
    with pytest.raises(ValueError, match=r"other steps \[3 there, 2 here\]"):
        train(tmp_path, steps=2)
    for allow, message in (("steps", "not 'steps'"), (("stpes",), "not stpes")):
        with pytest.raises(ValueError, match=f"allow must be a tuple of names among .*, {message}"):
            train(tmp_path, allow=allow)


def test_where_a_run_is_computed_may_change_and_is_written_down(tmp_path):
    train(tmp_path, steps=2)
    path = tmp_path / "run.json"
    told = json.loads(path.read_text())
    assert [entry["from_update"] for entry in told["computed"]] == [1]
    assert {"jax", "flax", "optax", "orbax-checkpoint"} <= told["computed"][0]["versions"].keys()
    train(tmp_path, steps=2)
    assert json.loads(path.read_text()) == told
    told["computed"][0]["versions"]["jax"] = "0.9"
    path.write_text(json.dumps(told))
    train(tmp_path, steps=2)
    assert [entry["from_update"] for entry in json.loads(path.read_text())["computed"]] == [1, 3]
    path.unlink()
    train(tmp_path, steps=2)
    assert path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 9, "run": {}, "computed": []}', '{"run": 1}']
)
def test_a_broken_file_is_told_in_one_sentence(begun, text):
    path = begun / "run.json"
    whole = path.read_text()
    try:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"run\.json is broken \(.*remove it") as caught:
            train(begun, steps=2)
    finally:
        path.write_text(whole)
    assert "\n" not in str(caught.value)


def test_a_full_disk_keeps_the_checkpoints_and_the_same_call_goes_on(tmp_path, monkeypatch):
    save = ocp.CheckpointManager.save

    def full(self, step, **options):
        if step > 4:
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device\nand more")
        return save(self, step, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(SaveFailed, match=r"\(no space left on device\); those before it stay") as caught:
        train(tmp_path)
    assert isinstance(caught.value, OSError) and "\n" not in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4"]
    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    jax.tree.map(np.testing.assert_array_equal, train(tmp_path).params, train(None).params)


def test_a_line_that_finds_no_room_is_an_error(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Log(tmp_path / "lines", step=0, steps=1, progress=False) as log:
        log._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
        with pytest.raises(
            OSError, match=r"a line could not be written to .*lines \(No space left on device\)"
        ):
            log.write(1, {"loss": 1.0})


def test_given_parameters_are_deleted_and_others_are_not(tmp_path):
    options = {"optimizer": optax.sgd(0.1), "steps": 1, "key": jax.random.key(1), "progress": False}
    for folder in (None, tmp_path, tmp_path):
        kept, given = initial_params(), initial_params()
        fit(loss, kept, Batches(), folder=folder, **options)
        state = fit(loss, given, Batches(), folder=folder, donate=True, **options)
        assert not any(x.is_deleted() for x in jax.tree.leaves((kept, state.params)))
        assert all(x.is_deleted() for x in jax.tree.leaves(given))


def test_shapes_are_those_of_the_state_that_is_made():
    for place in (lambda x: x, lambda x: jax.device_put(x, jax.devices()[0])):
        params = jax.tree.map(place, initial_params())
        arguments = params, optax.adam(1e-3), jax.random.key(0)
        shape, made = (f(*arguments, ema=True, teacher=params) for f in (TrainState.shape, TrainState.create))
        assert jax.tree.structure(shape) == jax.tree.structure(made)
        for told, array in zip(jax.tree.leaves(shape), jax.tree.leaves(made), strict=True):
            assert (told.shape, told.dtype) == (array.shape, array.dtype)
            assert isinstance(told, jax.Array) or (told.sharding is not None) == array.committed


def test_a_thread_may_train(tmp_path):
    """Python takes no signals there."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(train(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert ended[0].step == 1
