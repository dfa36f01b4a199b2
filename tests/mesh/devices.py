"""A process with four simulated devices, since the tests' own has one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Without the second, collectives of simulated devices may wait for each other for ever in jaxlib
# 0.10.
FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_enable_concurrency_optimized_scheduler=false"


def on_devices(*calls: list[Any]) -> list[Any]:
    """What functions of `on_devices.py` return: each call is a list of a name and arguments."""
    told = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "JAX_PLATFORMS": "cpu",
        # threads of XLA's pool, of which a collective holds one while it waits; else four
        "NPROC": "64",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE.parent, HERE))),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "on_devices.py"), json.dumps(calls)],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
