"""Laws of every objective of `paradec train`: what a killed run ends in, and what two processes
train.
"""

import json
import signal
import sys
import time

import numpy as np
import pytest
from commands import STARTS, started, weights, words

from paradec_jax.cli import main

pytestmark = pytest.mark.slow
# In collecting and in training.
PLACES = {
    "jacobi": ("round-0/trajectories/shard-00003.npy", "round-0/checkpoints/3"),
    "draft": ("answers/trajectories/shard-00003.npy", "draft/checkpoints/3"),
}


@pytest.mark.parametrize("objective", STARTS)
def test_kill_9_changes_no_bit(source, objective, tmp_path):
    often = {"updates": 40, "objective": objective}
    assert main(words(source, tmp_path / "whole", **often)) == 0
    for place in PLACES.get(objective, [f"{objective}/checkpoints/3"]):
        process = started(source, tmp_path / "run", "--checkpoint-every", 1, **often)
        while not (tmp_path / "run" / place).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL and not weights(tmp_path / "run")
    assert started(source, tmp_path / "run", **often).wait() == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole") != {}


@pytest.mark.parametrize("objective", STARTS)
def test_two_processes_have_the_losses_of_one(source, objective, tmp_path):
    """On as many devices, of which the rows of a batch are a multiple."""
    losses, more = [], ("--layers", 0.5) if objective in ("sft", "jacobi") else ()
    for count in "12":
        launcher = [sys.executable, "-m", "experiments.launch.local", "--processes", count]
        launcher += ["--devices", str(2 // int(count)), "--"]
        options = ("--held-out", source / "data.jsonl", "--cluster.fsdp", 2, *more)
        process = started(
            source, tmp_path / count, *options, launcher=launcher, objective=objective
        )
        assert process.wait() == 0
        lines = [
            json.loads(line)
            for line in (tmp_path / count / "metrics.jsonl").read_text().splitlines()
        ]
        first, last = lines[0], lines[-1]
        worth = [*last["before"].items(), *last["after"].items()]
        losses.append([first["loss"], *(x for name, x in worth if "seconds" not in name)])
    assert np.allclose(*losses, rtol=1e-5)
