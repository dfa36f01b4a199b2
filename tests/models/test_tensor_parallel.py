"""Heads and feed-forward split over four simulated devices: all-reduces alone, two a block."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = {"causal": 2, "recurrent_depth": 4, "masked_diffusion": 2}  # of the whole networks


@pytest.fixture(scope="module", params=["cpu", "plain"])
def found(request) -> dict:
    """What the program found, with the layouts of either kind."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    told = {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PARADEC_LAYOUTS": request.param,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("tensor_parallel.py"))],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("family", BLOCKS)
def test_collectives(found, family):
    one = found[family]
    assert one["blocks"] == {"all-reduce": 4}
    assert one["network"] == {"all-reduce": 2 * BLOCKS[family]}
    assert one["error"] < 1e-5
