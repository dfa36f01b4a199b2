"""The folder of a run: one holder, the run that it says it is, room that ends."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from noisy_regression import STEPS, Batches, initial_params, loss, train

from paradec_jax.train import FolderHeld, SaveFailed, adamw, fit
from paradec_jax.train.holder import held


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


def test_a_folder_that_cannot_be_written_is_refused_before_any_batch(tmp_path):
    (tmp_path / "file").write_text("")
    data = Batches()
    with pytest.raises(OSError, match=r"file/run cannot be written \(Not a directory\)"):
        train(tmp_path / "file" / "run", data)
    assert data.position == 0


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


def test_given_parameters_are_deleted_and_others_are_not(tmp_path):
    options = {"optimizer": optax.sgd(0.1), "steps": 1, "key": jax.random.key(1), "progress": False}
    for folder in (None, tmp_path, tmp_path):
        kept, given = initial_params(), initial_params()
        fit(loss, kept, Batches(), folder=folder, **options)
        state = fit(loss, given, Batches(), folder=folder, donate=True, **options)
        assert not any(x.is_deleted() for x in jax.tree.leaves((kept, state.params)))
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
