"""Runs of several processes that are killed, asked to end, or go on with fewer: counts for `make
cluster`.
"""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from cluster_counts import count
from launched import launched, pids, said, started
from noisy_regression import losses_of as updates

KILLS = int(os.environ.get("PARADEC_KILLS", "50"))
ENDS = int(os.environ.get("PARADEC_ENDS", "10"))
STEPS = 12
LONG = 300  # seconds
HEARTBEAT = 10


def wait_for(launcher, ready, folder):
    begun = time.monotonic()
    while not ready():
        assert launcher.poll() is None, said(folder)
        assert time.monotonic() - begun < LONG, said(folder)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes that nothing happened to: its curve, and what it returned."""
    folder = tmp_path_factory.mktemp("whole")
    (found, other) = launched(folder / "told", ["command", str(folder / "run"), STEPS])
    assert other[0]["params"] == found[0]["params"]
    return updates(folder / "run"), found[0]


def finished(folder, **options):
    """Goes on to the end of the run, and returns its curve and its last parameters."""
    found = launched(folder / "end", ["command", str(folder / "run"), STEPS], **options)
    return updates(folder / "run"), found[0][0]


@pytest.mark.cluster
def test_a_signal_to_one_of_two_ends_both_and_loses_nothing(tmp_path, whole, record_property):
    rng, held = random.Random(0), 0
    for which in range(ENDS):
        folder, asked = tmp_path / f"run-{which}", which % 2
        told = folder / "first"
        with started(told, ["command", str(folder / "run"), STEPS, 0.3]) as launcher:
            wait_for(launcher, lambda: len(updates(folder / "run")) > 0, told)  # noqa: B023
            time.sleep(rng.uniform(0, 1.5))
            os.kill(pids(told)[asked], signal.SIGTERM)
            code = launcher.wait(LONG)
        step = len(updates(folder / "run"))
        good = code == 0 and f"saved update {step} as" in said(told) and step < STEPS
        curve, end = finished(folder)
        assert good, (code, step, said(told))
        held += curve == whole[0] and end["params"] == whole[1]["params"]
    count(record_property, "processes", "SIGTERM to one of two, then the same command", ENDS, held)


@pytest.mark.cluster
def test_kills_of_one_of_two_change_no_bit(tmp_path, whole, record_property):
    rng, kills, held, saving, which = random.Random(1), 0, 0, 0, 0
    while kills < KILLS:
        folder, here = tmp_path / f"run-{which}", 0
        which += 1
        for turn in range(min(4, KILLS - kills)):
            told, dead = folder / f"turn-{turn}", rng.randrange(2)
            with started(
                told, ["command", str(folder / "run"), STEPS, 0.2], heartbeat=HEARTBEAT
            ) as launcher:
                wait_for(launcher, lambda: len(pids(told)) == 2, told)  # noqa: B023
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(rng.uniform(0, 15))
                if launcher.poll() is not None:
                    break
                saving += any((folder / "run" / "checkpoints").glob("*tmp*"))
                os.kill(pids(told)[dead], signal.SIGKILL)
                here += launcher.wait(LONG) == 128 + signal.SIGKILL
            assert f"process {dead} of 2 was ended by SIGKILL" in said(told)
        curve, end = finished(folder)
        kills += here
        held += here if curve == whole[0] and end["params"] == whole[1]["params"] else 0
    what = "kill -9 of one of two, then the same command"
    count(record_property, "processes", what, kills, held, in_a_save=saving)


@pytest.mark.cluster
@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_peer_ends_the_other_within_the_heartbeat(tmp_path, dead, record_property):
    """Without the launcher, which would end it sooner."""
    told = tmp_path / "told"
    options = {"heartbeat": HEARTBEAT, "patience": LONG}
    with started(told, ["command", str(tmp_path / "run"), 1000, 0.2], **options) as launcher:
        wait_for(launcher, lambda: len(updates(tmp_path / "run")) > 2, told)
        os.kill(pids(told)[dead], signal.SIGKILL)
        begun, other = time.monotonic(), pids(told)[1 - dead]
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() - begun < 10 * HEARTBEAT:
                os.kill(other, 0)
                time.sleep(0.1)
        took = time.monotonic() - begun
        launcher.wait(LONG)
    assert "lost another one" in said(told)
    held = int(took < 3 * HEARTBEAT)
    count(record_property, "processes", f"process {dead} dies", 1, held, seconds=round(took, 1))
