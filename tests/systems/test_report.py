"""The report of a device, at toy size, and what must be installed for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.systems import calls, machine, report
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
    """Two shapes, two windows, and rates that need no measuring."""
    timings = dict.fromkeys(("sum", "copy", "product"), machine.Timing((1.0, 2.0), (1.0, 2.0)))
    toy = {
        "CALLS": ("test-causal", "test-recurrent"),
        "shape_here": lambda name: (PRESETS[name], name),
        "WINDOWS": ((1, 4),),
        "CONTEXT": 8,
        "rates": lambda dtype: machine.Rates({"sum": 2e9, "copy": 3e9}, 1e9, timings),
    }
    for name, value in toy.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(calls, "LONG", 1e-6)


def test_every_part_has_its_rows(small, tmp_path):
    report.measure(tmp_path, 10.0)
    record = json.loads((tmp_path / "report.json").read_text())
    rows = record["rows"]
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(report.PARTS)
    assert record["left_out"] == [] and "device" in record["facts"]
    reading = [row["figure"] for row in rows if row["part"] == "device"]
    assert reading == ["2 GB/s", "3 GB/s, the read rate", "1 GFLOP/s"]
    one, four, *others = [row for row in rows if row["part"] == "calls"]
    assert [row["positions"] for row in (one, four, *others)] == [1, 4] * 2
    assert "speedup" not in one and four["needed"] == pytest.approx(1 / four["speedup"])
    for row in rows:
        assert len(row["passes"]) == len(row["processor"]) >= 2 and row["seconds"] > 0
    text = (tmp_path / "report.md").read_text()
    assert text.count("\n| ") == 2 + len(rows) and "Not measured" not in text


def test_what_finds_no_time_is_told(small, tmp_path):
    empty = report.Report(tmp_path, {})
    report.calls(empty, machine.Clock(0))
    empty.write()
    assert not empty.rows
    text = (tmp_path / "report.md").read_text()
    assert "- calls, test-causal, 1, 4 positions: no time was left" in text


def test_neither_the_package_nor_the_report_needs_what_only_commands_and_training_use():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
