"""Runs that are killed, asked to end, out of room, damaged, or go on on other devices: counts for
`make cluster`.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from cluster_counts import count
from noisy_regression import STEPS, assert_same, losses_of, python, train
from training_command import FULL, LONG, end_of, ended, started, told, wait_for

from paradec_jax.train import NoneReadable

KILLS = int(os.environ.get("PARADEC_KILLS", "50"))
ENDS = int(os.environ.get("PARADEC_ENDS", "10"))
DAMAGED = int(os.environ.get("PARADEC_DAMAGED", "300"))
DAMAGES = ("flip", "cut", "delete", "swap", "shard")
DEVICES = 4
CLOSE = 1e-5
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its state and its losses."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    state = train(folder, of_hooks={"save": 1, "log": 1})
    return state, losses_of(folder)


@pytest.fixture(scope="module")
def whole_on_devices(tmp_path_factory):
    """The folder of a run on several devices, each with its part of the parameters."""
    folder = tmp_path_factory.mktemp("devices") / "run"
    assert ended(folder, devices=DEVICES) == 0, told(folder)
    return folder


def test_kills_at_random_moments_change_no_bit_and_block_nothing(
    tmp_path, whole_on_devices, record_property
):
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
        assert_same(end_of(folder), end_of(whole_on_devices))
        held += here if losses_of(folder) == losses_of(whole_on_devices) else 0
    told_of = f"kill -9 on {DEVICES} devices, then the same command"
    count(record_property, "loop", told_of, kills, held, in_a_save=saving)


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
    count(record_property, "loop", "SIGTERM, then the same call", ends, held)


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
    count(record_property, "loop", "a full disk, then room", len(cases), held)


def damage(folder: Path, how: str, rng: random.Random) -> str:
    """Damages one file of a checkpoint, or two, and tells which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    # of which the small ones hold little that is read
    shards = [path for path in files if path.parent.name == "d"]
    if how == "shard" or rng.random() < 0.5:
        (file,) = rng.choices(shards, [path.stat().st_size for path in shards])
    else:
        file = rng.choice(files)
    content = bytearray(file.read_bytes())
    if how in ("delete", "shard"):
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    else:
        other = rng.choice([path for path in files if path.read_bytes() != content])
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    return f"{how} {file.relative_to(folder)}"


def restore_damaged(whole: Path, folder: Path, cases: int):
    """Damages copies of a run's newest checkpoint and restores each; writes what came out to
    `folder/found.json`.

    Beside the one before it, it is read as it was or passed over for that one; alone, it is read or
    refused.
    """
    rng, found, checkpoints = random.Random(0), Counter(), whole / "checkpoints"
    steps, saved = sorted(int(path.name) for path in checkpoints.iterdir()), {}
    for step in steps:
        shutil.copytree(
            checkpoints / str(step), folder / f"only-{step}" / "checkpoints" / str(step)
        )
        saved[step] = end_of(folder / f"only-{step}")
    warnings.simplefilter("ignore")
    for case in range(cases):
        run, alone = folder / "run", case % 2 == 1
        shutil.copytree(folder / f"only-{steps[-1]}" if alone else whole, run)
        what = damage(run / "checkpoints" / str(steps[-1]), DAMAGES[case % len(DAMAGES)], rng)
        try:
            state = end_of(run)
        except NoneReadable:
            assert alone, what
            found["refused"] += 1
        else:
            step = int(state.step)
            assert step == steps[-1] or not alone, what
            assert_same(state, saved[step])
            found["passed_over" if step < steps[-1] else "equal"] += 1
        shutil.rmtree(run)
    (folder / "found.json").write_text(json.dumps(found))


def test_no_damage_gives_a_wrong_value(tmp_path, whole_on_devices, record_property):
    """In a process of its own: Orbax leaves reads behind, of which Python tells when it ends."""
    code = f"t.restore_damaged(t.Path({str(whole_on_devices)!r}), t.Path({str(tmp_path)!r}), {DAMAGED})"
    assert python("test_faults", code).wait(1800) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert min(found["equal"], found["passed_over"], found["refused"]) > 0
    count(record_property, "loop", "checkpoints damaged", DAMAGED, sum(found.values()), **found)


def test_a_run_goes_on_with_other_numbers_of_devices(tmp_path, whole_on_devices, record_property):
    folder, numbers = tmp_path / "run", (4, 2, 1, 4)
    for turn, devices in enumerate(numbers, 1):
        end_at = turn * STEPS // len(numbers)
        assert ended(folder, devices=devices, end_at=end_at if end_at < STEPS else None) == 0, told(
            folder
        )
    computed = json.loads((folder / "run.json").read_text())["computed"]
    assert [place["device"]["devices"] for place in computed] == list(numbers)
    found, wanted = ([loss for _, loss in losses_of(one)] for one in (folder, whole_on_devices))
    assert [step for step, _ in losses_of(folder)] == list(range(1, STEPS + 1))
    apart = float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))
    pairs = zip(
        *(jax.tree.leaves(end_of(one).params) for one in (folder, whole_on_devices)), strict=True
    )
    params = max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in pairs)
    held = apart < CLOSE and params < 1e-3  # AdamW divides small gradients by their size
    what = f"restored on {' -> '.join(map(str, numbers))} devices"
    count(record_property, "loop", what, 1, int(held), losses=apart, params=params)
