"""An evaluation whose processes are killed, finished with other numbers of them: counts for `make cluster`."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("PARADEC_KILLS", "50")) // 5
LONG = 300  # seconds
ITEMS = 16


def command(folder, process, processes, out="out.jsonl"):
    options = {
        "--shots": 0,
        "--max-new-tokens": 24,
        "--rows": 1,
        "--decoder": "autoregressive",
        "--model": "tiny-causal",
    }
    options |= {"--out": folder / out, "--process": process, "--processes": processes}
    told = [str(word) for pair in options.items() for word in pair]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.benchmarks.evaluate", "gsm8k", str(folder / "task.jsonl"), *told],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def written(folder):
    """Whole lines of the parts."""
    return sum(path.read_text().count("\n") for path in folder.glob("out.jsonl.part-*"))


def lines_of(path):
    _, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in line.items() if name != "seconds"} for line in lines]


@contextlib.contextmanager
def started(folder, processes):
    children = [command(folder, process, processes) for process in range(processes)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stderr.close()


@pytest.mark.cluster
def test_an_evaluation_loses_and_doubles_nothing(tmp_path, record_property):
    rows = [
        {"question": f"Ana has {i} apples and buys {i + 1}. How many?", "answer": f"#### {2 * i + 1}"}
        for i in range(ITEMS)
    ]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = command(tmp_path, 0, 1, "whole.jsonl")
    assert whole.wait(LONG) == 0, whole.stderr.read()
    rng, kills, torn = random.Random(0), 0, 0
    while kills < KILLS:
        before, begun = written(tmp_path), time.monotonic()
        with started(tmp_path, rng.randint(1 if before else 2, 3)) as children:
            while written(tmp_path) == before and any(child.poll() is None for child in children):
                assert time.monotonic() - begun < LONG
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            living = [child for child in children if child.poll() is None]
            for child in living:
                child.kill()
            kills += len(living)
        if (tmp_path / "out.jsonl").exists() and not written(tmp_path):
            break
        torn += any(not path.read_text().endswith("\n") for path in tmp_path.glob("out.jsonl.part-*"))
    with started(tmp_path, 2) as children:
        for child in children:
            assert child.wait(LONG) == 0, child.stderr.read()
    held = lines_of(tmp_path / "out.jsonl") == lines_of(tmp_path / "whole.jsonl")
    found = {"cases": kills, "held": kills * held, "torn": torn}
    record_property(
        "cluster", {"part": "processes", "what": "an evaluation killed, then other numbers", **found}
    )
    assert held and kills > 0 and not list(tmp_path.glob("out.jsonl.part-*"))
