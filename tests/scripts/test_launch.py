"""The launcher of one machine, with commands that need no JAX, and the files of clusters."""

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

from experiments.launch import local
from paradec_jax.train.launch import CLUSTERS, VARIABLES, initialize, leave

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "launch"
TELL = f"""
import os, sys
told = [os.environ[name] for name in {VARIABLES!r}]
sys.stdout.write(f"{{' '.join(told)}} {{os.environ.get('XLA_FLAGS')}}\\n")
"""
WAIT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(FOLDER, str(os.getpid())).touch()
time.sleep(100)
"""


def launch(code, *options):
    command = [sys.executable, "-m", "experiments.launch.local", *options, "--", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_launcher_sets_what_processes_read():
    assert local.VARIABLES == VARIABLES


def test_each_is_told_where_the_others_are():
    process = launch(TELL, "--processes", "3", "--port", "4567")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [f"localhost:4567 3 {i} None" for i in range(3)]
    out, _ = launch(TELL, "--processes", "1", "--devices", "4").communicate(timeout=60)
    assert re.fullmatch(r"localhost:\d+ 1 0 --xla_force_host_platform_device_count=4 --xla_cpu.*\n", out)


def test_passes_that_the_user_switched_off_stay_off():
    own = local.flags("--xla_cpu_use_xnnpack=false --xla_disable_hlo_passes=dce,cse", 2).split()
    assert own[0] == "--xla_cpu_use_xnnpack=false"
    assert own[-1] == "--xla_disable_hlo_passes=dce,cse,cpu-all-reduce-combiner"
    assert sum("disable_hlo" in word for word in own) == 1
    alone = [*own[1:-1], "--xla_disable_hlo_passes=cpu-all-reduce-combiner"]
    assert local.flags("", 2).split() == alone


def test_one_that_fails_ends_all():
    process = launch(
        f"import os, sys, time; os.environ[{VARIABLES[2]!r}] == '1' and sys.exit(7); time.sleep(100)",
        *("--processes", "2", "--patience", "0.2"),
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err == "launch: process 1 of 2 ended with code 7: the others are ended\n"


def waiting(folder, code, *options):
    code, begun = code.replace("FOLDER", repr(str(folder))), time.monotonic()
    process = launch(code, "--processes", "2", *options)
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    return process


def test_a_signal_goes_on_to_all(tmp_path):
    process = waiting(tmp_path, WAIT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_one_that_hangs_after_the_signal_is_killed(tmp_path):
    """The first of two saves and ends, the second waits for something for ever."""
    code = WAIT.replace(
        "lambda *_: sys.exit(0)", f"lambda *_: os.environ[{VARIABLES[2]!r}] == '1' or sys.exit(0)"
    )
    process = waiting(tmp_path, code, "--grace", "0.5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert err == "launch: 1 of 2 have not ended 0.5 s after the signal: they are killed\n"


def test_the_second_interrupt_kills(tmp_path):
    process = waiting(tmp_path, WAIT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "was ended by SIGKILL" in err


def test_what_the_launcher_refuses():
    for options in (["--processes", "0"], ["--processes", "1", "--devices", "0"]):
        process = launch("", *options)
        assert "need at least one process" in process.communicate(timeout=60)[1] and process.returncode == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("host:1", 2, None), "coordinator, processes and process belong together, not host:1, 2 and None"),
        (("host", 2, 0), "coordinator must be HOST:PORT, not host"),
        (("host:1", 2, 2), "process must be from 0 to 1 of 2, not 2"),
    ],
)
def test_what_initialize_refuses(given, sentence, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        initialize(*given)
    with pytest.raises(ValueError, match="heartbeat_s and start_s must be at least 1, not 0 and 300"):
        initialize(heartbeat_s=0)
    monkeypatch.setenv(VARIABLES[0], "host:1")
    monkeypatch.setenv(VARIABLES[1], "two")
    with pytest.raises(ValueError, match="must be whole numbers"):
        initialize()


@pytest.fixture
def alone(monkeypatch):
    """No cluster to be found, and a function that counts the calls of JAX's own and raises what it is given."""
    for name in (*VARIABLES, *CLUSTERS, "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("OMPI_")]:
        monkeypatch.delenv(name)

    def refuse(error):
        asked = []

        def initialized(*given, **options):
            asked.append(given)
            raise error

        monkeypatch.setattr(jax.distributed, "initialize", initialized)
        return asked

    return refuse


def test_one_process_needs_nothing(alone, monkeypatch):
    initialize("host:1", 1, 0)
    jax.devices()
    initialize()  # a device was asked for
    assert not jax.distributed.is_initialized()
    asked = alone(ValueError("coordinator_address should be defined."))
    initialize()
    assert len(asked) == 1
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    initialize(processes=1)
    assert len(asked) == 1


def test_what_jax_says_is_told_as_what_it_is(alone, monkeypatch):
    jax.devices()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    for given in ((), ("host:1", 2, 0)):
        with pytest.raises(ValueError, match="must be called before anything asks JAX for a device"):
            initialize(*given)
    alone(RuntimeError("UNKNOWN: port 1\nis in use"))
    with pytest.raises(OSError, match=r"^UNKNOWN: port 1 is in use$"):
        initialize("host:1", 2, 0)
    alone(RuntimeError("DEADLINE_EXCEEDED: late"))
    with pytest.raises(OSError, match="not all of 2 processes came to host:1 in 5 s"):
        initialize("host:1", 2, 0, start_s=5)
    with pytest.raises(OSError, match="not all of the processes came in 300 s"):
        initialize()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="call initialize once"):
        initialize("host:1", 2, 0)


def test_leaving_asks_for_no_device(monkeypatch):
    def started():
        raise AssertionError

    monkeypatch.setattr(jax, "process_count", started)
    with pytest.raises(SystemExit, match=r"^no room$"):
        leave(OSError("no room"))


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.yaml")) + sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name
)
def test_files_of_clusters_are_well_formed_and_name_modules_that_are_there(path):
    text = path.read_text()
    if path.suffix == ".sh":
        subprocess.run(["bash", "-n", str(path)], check=True)
    else:
        parts = list(yaml.safe_load_all(text))
        assert parts[-1]["kind"] in ("JobSet", "Job") and all("metadata" in part for part in parts)
    (module,) = set(re.findall(r"experiments\.common\.\w+", text))
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists() and str(
        path.relative_to(ROOT)
    ) in text
