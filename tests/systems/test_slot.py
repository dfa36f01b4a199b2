"""The programs for a lent accelerator, at toy size on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_laws_hold_and_every_decoder_has_a_row(tmp_path):
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path), "TOY": "1"}
    words = ["sh", str(ROOT / "experiments" / "systems" / "slot.sh")]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    laws, decoders = (
        json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("laws", "decoders")
    )
    assert len(laws) == 4 and all(row["equal"] and row["recorded"] for row in laws), laws
    assert len(decoders) == 12 and all(row["milliseconds"] > 0 for row in decoders)
    assert (tmp_path / "report" / "report.json").exists()
