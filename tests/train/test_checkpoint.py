"""A run goes on on another mesh."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from noisy_regression import STEPS, Batches, hooks, initial_params, loss, losses_of, python

import paradec_jax as pd
from paradec_jax.train import TrainState, adamw, fit, make_train_step


def train_on_meshes(folder: Path) -> None:
    """Four updates each on four devices, on two and on one, against twelve on one."""

    def run(place: Path, devices: int, steps: int) -> TrainState:
        mesh = None if devices == 1 else pd.make_mesh(1, -1, 1, devices=jax.devices()[:devices])
        optimizer = adamw(1e-2, STEPS, warmup=3, eps=1e-4)
        where = None if mesh is None else jax.NamedSharding(mesh, jax.P())
        params = jax.device_put(initial_params(), where)
        state = TrainState.create(params, optimizer, jax.random.key(0), ema=True)
        step = make_train_step(loss, optimizer, ema_decay=0.9)
        state = fit(
            step, state, Batches(), steps=steps, hooks=hooks(place, log=1, allow=("steps",)), mesh=mesh
        )
        assert len(state.params["embedding"].sharding.device_set) == devices
        return state

    whole = run(folder / "whole", 1, STEPS)
    for devices, steps in ((4, 4), (2, 8), (1, STEPS)):
        state = run(folder / "run", devices, steps)
    pairs = ((state.params, whole.params), (losses_of(folder / "run"), losses_of(folder / "whole")))
    for found, wanted in pairs:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.slow
def test_restore_on_another_mesh(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    code = f"t.train_on_meshes(t.Path({str(tmp_path)!r}))"
    process = python("test_checkpoint", code, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert process.wait(240) == 0
