"""The dry run of the script for a lent accelerator: each part is stopped once and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.systems.slot import VARIANTS

SCRIPT = Path(__file__).parents[2] / "experiments" / "systems" / "slot.sh"
LIMIT = 1800  # seconds until a file is to be there
pytestmark = pytest.mark.slow


def stopped_at(path, variables):
    """Begins the script, and kills all of its processes once a file is there."""
    process = subprocess.Popen(["sh", str(SCRIPT)], env=variables, start_new_session=True)
    try:
        begun = time.monotonic()
        while not path.exists():
            assert process.poll() is None and time.monotonic() - begun < LIMIT
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_every_part_goes_on_where_it_was_stopped(tmp_path):
    out, runs = tmp_path / "out", tmp_path / "runs"
    own = {"PYTHON": sys.executable, "TOY": "1", "OUT": str(out), "RUNS": str(runs)}
    variables = os.environ | own
    stopped_at(out / "variants.json", variables)
    calls = rows_of(out / "variants.json")
    stopped_at(runs / "draft" / "recipe.json", variables)
    begun = (runs / "words" / "metrics.jsonl").stat().st_mtime_ns
    assert not (out / "fast.log").exists() and not (runs / "draft" / "adapter").exists()
    stopped_at(out / "gain.json", variables)
    gains = rows_of(out / "gain.json")
    done = subprocess.run(
        ["sh", str(SCRIPT)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    laws = rows_of(out / "laws.json")
    assert len(laws) == 4 and all(row["equal"] and row["recorded"] for row in laws), laws
    rows = rows_of(out / "variants.json")
    assert rows[: len(calls)] == calls and len(calls) < len(rows)
    assert all(row["milliseconds"].keys() == set(VARIANTS) for row in rows)
    assert "Median speed: " in (out / "variants.log").read_text()
    assert "one by one" in (out / "demo.log").read_text()
    assert [row["run"] for row in rows_of(out / "fast.json")] == ["words", "draft", "jacobi"]
    assert (runs / "words" / "metrics.jsonl").stat().st_mtime_ns == begun
    assert (out / "adapter" / "adapter_config.json").exists()
    assert rows_of(out / "gain.json")[: len(gains)] == gains
    assert [row["decoder"] for row in rows_of(out / "gain.json")] == [
        "autoregressive",
        "drafted",
        "autoregressive",
        "jacobi",
    ]
