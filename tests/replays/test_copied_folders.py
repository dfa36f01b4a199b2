"""Every replay reads the folder that `PARADEC_GOLDEN` names: it passes on a copy, and without files
none passes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import over
from recorded import GOLDEN

pytestmark = [pytest.mark.golden, pytest.mark.slow]

FAMILIES = (
    "recurrent_depth",
    "jacobi",
    "masked_diffusion",
    "block_diffusion",
    "baselines",
    "full",
    "selfverify",
)


def replays(family: str, folder: Path) -> dict[str, int]:
    """Outcomes of a family's replays of `folder/family`, counted."""
    files = sorted(Path(__file__).parent.glob(f"test_golden_{family}*.py"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-m",
        "not slow",
        *map(str, files),
    ]
    told = subprocess.run(
        command, env={**os.environ, "PARADEC_GOLDEN": str(folder)}, capture_output=True, text=True
    )
    summary = told.stdout.strip().splitlines()[-1]
    counts = {
        name: int(count)
        for count, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", summary)
    }
    assert counts, told.stdout[-2000:] + told.stderr[-2000:]
    return counts


@over(FAMILIES, argument="family")
def test_a_copy_is_replayed(family, tmp_path):
    shutil.copytree(GOLDEN / family, tmp_path / "copied" / family)
    counts = replays(family, tmp_path / "copied")
    assert counts["passed"] > 10 and not counts.keys() & {"failed", "error", "errors"}, counts


@over(FAMILIES, argument="family")
def test_nothing_passes_without_the_folder(family, tmp_path):
    assert "passed" not in replays(family, tmp_path)
