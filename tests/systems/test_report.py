"""The report of a device, at toy size, alone and with the other programs of a lent one; what must
be installed.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.systems import report
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.families import PRESETS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grain", "tyro", "docstring_parser"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import paradec_jax, paradec_jax.data, paradec_jax.evaluate, paradec_jax.losses, paradec_jax.train
import experiments.systems.report
"""


@pytest.fixture
def small(monkeypatch):
    """Two shapes, two windows, toy trainings, and rates that need no measuring."""
    for name in ("CALLS", "ONE_BY_ONE"):
        monkeypatch.setattr(report, name, ("test-causal", "test-recurrent"))
    monkeypatch.setattr(report, "shape_here", lambda name: (PRESETS[name], name))
    for name, value in {"WINDOWS": ((1, 4),), "CONTEXT": 8, "TOKENS": 3, "LONG": 1e-6}.items():
        monkeypatch.setattr(report, name, value)
    timing = report.Timing((1.0, 2.0), (1.0, 2.0))
    found = report.Rates(
        {"sum": 2e9, "copy": 3e9}, 1e9, {"sum": timing, "copy": timing, "product": timing}
    )
    monkeypatch.setattr(report, "rates", lambda dtype: found)
    toy = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=8, max_length=512)
    monkeypatch.setattr(report, "CAUSAL_PRESETS", {"tiny-causal": toy})


def test_every_part_has_its_rows(small, tmp_path):
    parts = ["device", "calls", "autoregressive", "training"]
    found = report.measure(tmp_path, 10.0, parts)
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["rows"] == json.loads(json.dumps(found.rows)) and told["left_out"] == []
    assert list(dict.fromkeys(row["part"] for row in told["rows"])) == parts
    assert told["options"]["parts"] == parts and "device" in told["facts"]
    reading = [row["figure"] for row in told["rows"] if row["part"] == "device"]
    assert reading == ["2 GB/s", "3 GB/s, the read rate", "1 GFLOP/s"]
    calls = [row for row in told["rows"] if row["part"] == "calls"]
    assert [row["positions"] for row in calls] == [1, 4] * 2
    assert "speedup" not in calls[0] and calls[1]["needed"] == pytest.approx(
        1 / calls[1]["speedup"]
    )
    for row in told["rows"]:
        assert len(row["passes"]) == len(row["processor"]) >= 2 and row["seconds"] > 0
    text = (tmp_path / "report.md").read_text()
    assert text.count("\n| ") == 2 + len(told["rows"]) and "Not measured" not in text


def test_bundled_models_at_every_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "PAIRS", {"tiny-jacobi": report.PAIRS["tiny-jacobi"]})
    found = report.Report(tmp_path, {})
    report.bundled(found, report.Clock(600), batches=(1,))
    one, parallel = found.rows
    assert one["tokens"] == parallel["tokens"] and one["network_calls"] > parallel["network_calls"]
    assert parallel["against"] == report.PAIRS["tiny-jacobi"][0].name and parallel["speedup"] > 0


def test_what_finds_no_time_is_told(small, tmp_path):
    found = report.Report(tmp_path, {})
    report.calls(found, report.Clock(0))
    report.training(found, report.Clock(0))
    assert not found.rows and [one["why"] for one in found.left_out] == ["no time was left"] * 3
    found.write()
    assert (
        "- training, tiny-causal, 16 x 256: no time was left"
        in (tmp_path / "report.md").read_text()
    )


def test_neither_the_package_nor_the_report_needs_what_only_commands_and_training_use():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_laws_hold_and_every_decoder_has_a_row(tmp_path):
    """The programs for a lent accelerator."""
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path), "TOY": "1"}
    words = ["sh", str(ROOT / "experiments" / "systems" / "slot.sh")]
    done = subprocess.run(
        words, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    laws, decoders = (
        json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("laws", "decoders")
    )
    assert len(laws) == 4 and all(row["equal"] and row["recorded"] for row in laws), laws
    assert len(decoders) == 12 and all(row["milliseconds"] > 0 for row in decoders)
    assert (tmp_path / "report" / "report.json").exists()
