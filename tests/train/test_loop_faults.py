"""Runs as processes that are killed, asked to end, begun twice or out of room: counts for `make cluster`."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from noisy_regression import Batches, python, train
from training_command import FULL, LONG, assert_same, count, end_of, ended, started, told, updates, wait_for

from paradec_jax.train import fit

KILLS = int(os.environ.get("PARADEC_KILLS", "50"))
ENDS = int(os.environ.get("PARADEC_ENDS", "10"))
DEVICES = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its state and its losses."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    state = train(folder, checkpoint_every=1, log_every=1)
    return state, updates(folder)


@pytest.fixture(scope="module")
def whole_on_devices(tmp_path_factory):
    """The same for a run on several devices, each with its part of the parameters."""
    folder = tmp_path_factory.mktemp("devices") / "run"
    assert ended(folder, devices=DEVICES) == 0, told(folder)
    return end_of(folder), updates(folder)


@pytest.mark.cluster
def test_kills_at_random_moments_change_no_bit_and_block_nothing(tmp_path, whole_on_devices, record_property):
    rng, kills, held, saving, round_ = random.Random(0), 0, 0, 0, 0
    while kills < KILLS:
        folder, here, moment = tmp_path / f"run-{round_}", 0, rng.uniform(0, 1.5)
        round_ += 1
        ended = False
        while not ended:
            with started(folder, devices=DEVICES) as process:
                mine = f"{process.pid} "
                holder = folder / ".holder"
                ready = lambda: holder.exists() and holder.read_text().startswith(mine)  # noqa: E731, B023
                assert wait_for(process, ready), told(folder)
                if here < 4 and kills + here < KILLS:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(moment)
                    saving += any((folder / "checkpoints").glob("*tmp*"))
                    process.kill()
                ended = process.wait(LONG) == 0
                here += process.returncode == -signal.SIGKILL
            moment = rng.uniform(0, 1.5)
        kills += here
        state, losses = whole_on_devices
        assert_same(end_of(folder), state)
        held += here if updates(folder) == losses else 0
    told_of = f"kill -9 on {DEVICES} devices, then the same command"
    count(record_property, told_of, kills, held, in_a_save=saving)


@pytest.mark.cluster
def test_a_run_that_is_asked_to_end_saves_and_exits_0(tmp_path, whole, record_property):
    rng, ends, held = random.Random(1), 0, 0
    for which in range(ENDS):
        folder = tmp_path / f"run-{which}"
        with started(folder) as process:
            assert wait_for(process, lambda: len(updates(folder)) > 0), told(folder)  # noqa: B023
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.8))
            process.send_signal(signal.SIGTERM)
            code = process.wait(LONG)
        ends += 1
        step = len(updates(folder))
        sentence = f"saved update {step} as {folder.resolve() / 'checkpoints' / str(step)}"
        good = code == 0 and len(told(folder)) == 1 and sentence in told(folder)[0]
        state, losses = whole
        assert_same(train(folder, checkpoint_every=1, log_every=1), state)
        held += good and updates(folder) == losses
    count(record_property, "SIGTERM, then the same call", ends, held)


@pytest.mark.cluster
def test_after_initialize_the_service_of_jax_notices(tmp_path, record_property):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder, steps = tmp_path / "run", 100
    with started(folder, steps=steps, port=port) as process:
        assert wait_for(process, lambda: len(updates(folder)) > 2), told(folder)
        process.send_signal(signal.SIGTERM)
        code = process.wait(LONG)
    step = len(updates(folder))
    held = code == 0 and f"saved update {step} as" in told(folder)[-1] and step < steps
    assert train(folder, steps=steps, checkpoint_every=1, log_every=1).step == steps
    held = held and [at for at, _ in updates(folder)] == list(range(1, steps + 1))
    count(record_property, "SIGTERM after jax.distributed.initialize", 1, int(held))


@pytest.mark.cluster
def test_a_second_command_is_refused_and_the_first_goes_on(tmp_path, whole, record_property):
    folder = tmp_path / "first" / "run"
    folder.mkdir(parents=True)
    with started(folder, delay=1.0) as first:
        assert wait_for(first, lambda: len(updates(folder)) > 0), told(folder)
        second = python("training_command", f"t.command({str(folder)!r})")
        refused = second.wait(LONG)
        assert first.wait(LONG) == 0
    count(record_property, "a second run in one folder", 1, int(refused == 1 and updates(folder) == whole[1]))


@pytest.mark.cluster
def test_a_full_disk_and_then_room(tmp_path, whole, record_property):
    room = tmp_path / "room"
    room.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(room)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        folder, held, cases = room / "run", 0, (5, 6, 8)
        for at in cases:
            with started(folder, full_at=at, delay=0.0) as process:
                code = process.wait(LONG)
            kept = [p.name for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
            lines = told(folder)
            (room / FULL).unlink()
            assert_same(train(folder, log_every=1), whole[0])
            assert code == 1 and "4" in kept, (code, kept, lines)
            held += "could not be written" in lines[-1]  # below what Orbax logs
            subprocess.run(["rm", "-r", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(room)], check=True)
    count(record_property, "a full disk, then room", len(cases), held)


def peak_of(folder: str, donate: bool) -> None:
    """Prints the largest sum of living arrays while a finished run is read, in states."""
    params = {f"layer_{i}": jnp.zeros((512, 512)) + i for i in range(16)}
    size = 4 * sum(x.nbytes for x in jax.tree.leaves(params))  # parameters, their average and two moments
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
            time.sleep(0.001)

    watch = threading.Thread(target=look)
    options = {"optimizer": optax.adam(1e-3), "steps": 1, "key": jax.random.key(0), "ema_decay": 0.9}
    if (Path(folder) / "checkpoints").exists():
        watch.start()
    fit(square, params, Batches(), folder=folder, progress=False, donate=donate, **options)
    done.set()
    print(max(seen) / size)


def square(params, frozen, batch, key):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)), {}


@pytest.mark.slow
def test_a_run_that_goes_on_holds_one_state(tmp_path):
    """Before, it held two and the parameters of the caller."""
    peaks = []
    for donate in (False, False, True):
        code = f"import test_loop_faults as t; t.peak_of({str(tmp_path / 'run')!r}, {donate})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not process.returncode, process.stderr
        peaks.append(float(process.stdout))
    print(peaks)
    assert peaks[0] == 0 and 1 <= peaks[1] <= 1.4 and 1 <= peaks[2] <= 1.15, peaks
