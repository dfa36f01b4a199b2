"""Runs as processes that are killed, asked to end or out of room: counts for `make cluster`."""

import contextlib
import os
import random
import signal
import subprocess

import pytest
from noisy_regression import assert_same, losses_of, train
from training_command import FULL, LONG, count, end_of, ended, started, told, wait_for

KILLS = int(os.environ.get("PARADEC_KILLS", "50"))
ENDS = int(os.environ.get("PARADEC_ENDS", "10"))
DEVICES = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its state and its losses."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    state = train(folder, of_hooks={"save": 1, "log": 1})
    return state, losses_of(folder)


@pytest.fixture(scope="module")
def whole_on_devices(tmp_path_factory):
    """The same for a run on several devices, each with its part of the parameters."""
    folder = tmp_path_factory.mktemp("devices") / "run"
    assert ended(folder, devices=DEVICES) == 0, told(folder)
    return end_of(folder), losses_of(folder)


@pytest.mark.cluster
def test_kills_at_random_moments_change_no_bit_and_block_nothing(tmp_path, whole_on_devices, record_property):
    rng, kills, held, saving, round_ = random.Random(0), 0, 0, 0, 0
    while kills < KILLS:
        folder, here, moment = tmp_path / f"run-{round_}", 0, rng.uniform(0, 1.5)
        round_ += 1
        ended = False
        while not ended:
            with started(folder, devices=DEVICES) as process:
                mine = f"process {process.pid} "
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
        held += here if losses_of(folder) == losses else 0
    told_of = f"kill -9 on {DEVICES} devices, then the same command"
    count(record_property, told_of, kills, held, in_a_save=saving)


@pytest.mark.cluster
def test_a_run_that_is_asked_to_end_saves_and_exits_0(tmp_path, whole, record_property):
    rng, ends, held = random.Random(1), 0, 0
    for which in range(ENDS):
        folder = tmp_path / f"run-{which}"
        with started(folder) as process:
            assert wait_for(process, lambda: len(losses_of(folder)) > 0), told(folder)  # noqa: B023
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.8))
            process.send_signal(signal.SIGTERM)
            code = process.wait(LONG)
        ends += 1
        step = len(losses_of(folder))
        sentence = f"saved update {step} as {folder.resolve() / 'checkpoints' / str(step)}"
        good = code == 0 and len(told(folder)) == 1 and sentence in told(folder)[0]
        state, losses = whole
        assert_same(train(folder, of_hooks={"save": 1, "log": 1}), state)
        held += good and losses_of(folder) == losses
    count(record_property, "SIGTERM, then the same call", ends, held)


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
            assert_same(train(folder, of_hooks={"log": 1}), whole[0])
            assert code == 1 and "4" in kept, (code, kept, lines)
            held += any("could not be written" in line for line in lines)  # among what Orbax logs
            subprocess.run(["rm", "-r", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(room)], check=True)
    count(record_property, "a full disk, then room", len(cases), held)
