"""Checkpoints alone: damage is noticed, what is restored is what was saved, on another mesh too."""

import dataclasses
import os
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from noisy_regression import Batches, initial_params, loss, python

from paradec_jax.train import Checkpoints, TrainState, make_train_step

# When one array of a damaged checkpoint fails, Orbax leaves the other reads running; their late answers find
# its event loop closed, which Python reports as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_one_altered_byte_is_noticed(tmp_path):
    """Whatever byte of the array files changes, restoring gives the saved values or raises."""
    state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.steps()
    for file in sorted((tmp_path / "0" / "state").rglob("d/*")):
        content = file.read_bytes()
        for at in (len(content) // 3, len(content) // 2, len(content) - 5):
            altered = bytearray(content)
            altered[at] ^= 0x10
            file.write_bytes(altered)
            with Checkpoints(tmp_path, read_only=True) as checkpoints, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    restored, _ = checkpoints.restore(state)
                except RuntimeError:
                    continue
                jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
        file.write_bytes(content)


def test_restore_errors_and_round_trip(tmp_path):
    state = TrainState.create(initial_params(), optax.adam(1e-3), jax.random.key(5), ema=True)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoints.restore(state)
        checkpoints.save(state, {"index": np.int64(3), "rows": np.arange(2)})
        restored, data_state = checkpoints.restore(state)
        later = dataclasses.replace(state, step=state.step + 2)
        checkpoints.save(later)
        with pytest.raises(ValueError, match="step 1 is not beyond the newest checkpoint"):
            checkpoints.save(dataclasses.replace(state, step=state.step + 1))
        assert checkpoints.steps() == [2]
    with Checkpoints(tmp_path, read_only=True) as reader, pytest.raises(ValueError, match="opened read-only"):
        reader.save(later)
    assert data_state == {"index": 3, "rows": [0, 1]}
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def train_on_meshes(folder: Path) -> None:
    """Saves on four devices, goes on with the same numbers on two and on one."""
    optimizer = optax.adam(0.1)
    step = make_train_step(loss, optimizer, ema_decay=0.9)

    def run(devices: int) -> None:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        rows = jax.NamedSharding(mesh, jax.P("data"))
        params = jax.device_put(initial_params(), jax.NamedSharding(mesh, jax.P()))
        state = TrainState.create(params, optimizer, jax.random.key(0), ema=True)
        batch = jax.device_put(next(Batches()), rows)
        with Checkpoints(folder) as checkpoints:
            if checkpoints.steps():
                state, _ = checkpoints.restore(state)
                assert state.params["embedding"].sharding.device_set == set(mesh.devices.flat)
            else:
                state, _ = step(state, None, batch)
                checkpoints.save(state)
        state, metrics = step(state, None, batch)
        assert state.step == 2 and metrics["finite"]
        results.append(jax.device_get((metrics["loss"], state.params)))

    results: list = []
    for devices in (4, 2, 1):
        run(devices)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results[0], results[-1]
        )


@pytest.mark.slow
def test_restore_on_another_mesh(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    process = python(
        "test_checkpoint",
        f"t.train_on_meshes(t.Path({str(tmp_path)!r}))",
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
    )
    assert process.wait(120) == 0
