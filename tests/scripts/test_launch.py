"""The launcher of processes on one machine, what processes read of their surroundings, and the
files of clusters.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml

from paradec_jax.train.processes import CLUSTERS, VARIABLES, initialize

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
FOLDER = ROOT / "experiments" / "launch"
WAIT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, ANSWER)
pathlib.Path(FOLDER, str(os.getpid())).touch()
time.sleep(100)
"""


def launch(code, *options):
    words = ["-m", "experiments.launch.local", *options, "--", sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_signal_goes_on_to_all_and_one_that_hangs_is_killed(tmp_path, hangs):
    stays = f"os.environ[{VARIABLES[2]!r}] == '1' and {hangs}"
    code = WAIT.replace("ANSWER", f"lambda *_: {stays} or sys.exit(0)").replace(
        "FOLDER", repr(str(tmp_path))
    )
    process, begun = launch(code, "--processes", "2", "--grace", "0.5"), time.monotonic()
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    late = "launch: 1 of 2 have not ended 0.5 s after the signal: they are killed\n"
    assert (process.returncode, err) == ((128 + signal.SIGKILL, late) if hangs else (0, ""))


def test_one_process_needs_nothing_and_what_jax_says_is_one_sentence(monkeypatch):
    for name in [*VARIABLES, *CLUSTERS, "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", *os.environ]:
        if (
            name in VARIABLES
            or name in CLUSTERS
            or name.startswith(("KUBERNETES", "SLURM", "OMPI_"))
        ):
            monkeypatch.delenv(name, raising=False)
    for given, sentence in (
        (("host", 2, 0), "coordinator as HOST:PORT"),
        (("host:1", 2, 2), "process from 0 to below processes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            initialize(*given)
    initialize("host:1", 1, 0)
    assert jax.devices() and not jax.distributed.is_initialized()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    with pytest.raises(OSError, match="must be called before"):
        initialize("host:1", 2, 0)

    def late(*given, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: late")

    monkeypatch.setattr(jax.distributed, "initialize", late)
    with pytest.raises(OSError, match="DEADLINE_EXCEEDED"):
        initialize("host:1", 2, 0)


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".yaml", ".sh"))
)
def test_files_of_clusters_are_well_formed_and_train(name):
    text = (FOLDER / name).read_text()
    if name.endswith(".sh"):
        subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
    else:
        parts = list(yaml.safe_load_all(text))
        assert parts[-1]["kind"] in ("JobSet", "Job") and all("metadata" in part for part in parts)
    assert re.search(r"-m,? paradec_jax\.cli,? train,? sft", text)
