"""Runs with damaged checkpoints and with other numbers of devices: counts for `make cluster`."""

import json
import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from noisy_regression import STEPS, assert_same, losses_of, python
from training_command import count, end_of, ended, told

from paradec_jax.train import NoneReadable

DAMAGED = int(os.environ.get("PARADEC_DAMAGED", "300"))
DAMAGES = ("flip", "cut", "delete", "swap", "shard")
DEVICES = 4
CLOSE = 1e-5
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run on four devices that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert ended(folder, devices=DEVICES) == 0, told(folder)
    return folder


def damage(folder: Path, how: str, rng: random.Random) -> str:
    """Damages one file of a checkpoint, or two, and tells which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    shards = [
        path for path in files if path.parent.name == "d"
    ]  # of which the small ones hold little that is read
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


def restore_damaged(whole: Path, folder: Path, cases: int) -> None:
    """Damages copies of a run's newest checkpoint and restores each; writes what came out to `folder/found.json`.

    Beside the one before it, it is read as it was or passed over for that one; alone, it is read or refused.
    """
    rng, found, checkpoints = random.Random(0), Counter(), whole / "checkpoints"
    steps, saved = sorted(int(path.name) for path in checkpoints.iterdir()), {}
    for step in steps:
        shutil.copytree(checkpoints / str(step), folder / f"only-{step}" / "checkpoints" / str(step))
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


def test_no_damage_gives_a_wrong_value(tmp_path, whole, record_property):
    """In a process of its own: Orbax leaves reads behind, of which Python tells when it ends."""
    code = f"t.restore_damaged(t.Path({str(whole)!r}), t.Path({str(tmp_path)!r}), {DAMAGED})"
    assert python("test_loop_damage", code).wait(1800) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert min(found["equal"], found["passed_over"], found["refused"]) > 0
    count(record_property, "checkpoints damaged", DAMAGED, sum(found.values()), **found)


def test_a_run_goes_on_with_other_numbers_of_devices(tmp_path, whole, record_property):
    folder, numbers = tmp_path / "run", (4, 2, 1, 4)
    for turn, devices in enumerate(numbers, 1):
        end_at = turn * STEPS // len(numbers)
        assert ended(folder, devices=devices, end_at=end_at if end_at < STEPS else None) == 0, told(folder)
    computed = json.loads((folder / "run.json").read_text())["computed"]
    assert [place["device"]["devices"] for place in computed] == list(numbers)
    found, wanted = ([loss for _, loss in losses_of(one)] for one in (folder, whole))
    assert [step for step, _ in losses_of(folder)] == list(range(1, STEPS + 1))
    apart = float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))
    pairs = zip(*(jax.tree.leaves(end_of(one).params) for one in (folder, whole)), strict=True)
    params = max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in pairs)
    held = apart < CLOSE and params < 1e-3  # AdamW divides small gradients by their size
    what = f"restored on {' -> '.join(map(str, numbers))} devices"
    count(record_property, what, 1, int(held), losses=apart, params=params)
