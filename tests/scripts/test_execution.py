"""Generated code in processes of its own: what passes, what does not, and what is left behind."""

import os
import sys
import time

import pytest

from experiments.lm_eval import execution
from experiments.lm_eval.execution import Limits, execute

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")

RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(0) == 0\n"
LIMITS = Limits(processor=1, wall=20.0)


def outcome(code, tests=TESTS, limits=LIMITS):
    return execute(code, tests, limits)


@pytest.mark.parametrize(
    "code",
    [
        RIGHT,
        RIGHT + "if __name__ == '__main__':\n    raise SystemExit('not for tests')\n",
        RIGHT + "print('x' * 2**25)\n",  # more than a file may hold, to a standard output that goes nowhere
        RIGHT + "import os, sys\nos.write = os._exit = sys.exit = print = None\n",
        "import sys\nassert sys.stdin.read() == ''\n" + RIGHT,
    ],
    ids=["right", "main block", "prints", "puts its own in place of functions", "reads"],
)
def test_right_code_passes(code):
    found = outcome(code)
    assert (found.passed, found.reason) == (True, "passed"), found.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def double(x):\n    return x\n", "AssertionError"),
        ("def double(x:\n", "SyntaxError"),
        (RIGHT + "'''", "SyntaxError"),  # must not swallow the tests
        (RIGHT + "x = \\", "SyntaxError"),
        (RIGHT + "\0", ""),
        (RIGHT + "\ud800", ""),
        ("def double(x):\n    return double(x)\n", "RecursionError"),
        ("def double(x):\n    return len('a' * 2**31)\n", "MemoryError"),
        ("def double(x):\n    open('f', 'wb').write(bytes(2**25))\n    return 2 * x\n", "File too large"),
        ("import os, signal\ndef double(x):\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
    ],
)
def test_wrong_code_fails_and_says_why(code, message):
    found = outcome(code)
    assert (found.passed, found.reason) == (False, "failed")
    assert message in found.stderr and len(found.stderr) < 2100


@pytest.mark.parametrize(
    "early",
    [
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "raise SystemExit\n",
        "print('passed'); import os; os._exit(0)\n",
        "import os\nif os.fork():\n    os._exit(0)\n",
        "import os\nos.execv('/bin/true', ['true'])\n",
        "def double(x):\n    exit(0)\n",
    ],
)
def test_an_early_end_is_no_pass(early):
    found = outcome(RIGHT + early)
    assert (found.passed, found.reason) == (False, "failed")


def test_clocks():
    busy = outcome("def double(x):\n    while True:\n        pass\n")
    assert (busy.passed, busy.reason) == (False, "timeout")
    began = time.monotonic()
    asleep = outcome("import time\ntime.sleep(60)\n", limits=Limits(wall=0.5))
    assert (asleep.passed, asleep.reason) == (False, "timeout")
    assert time.monotonic() - began < 30


def test_nothing_of_the_group_outlives_the_sample():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, file=sys.stderr)\n"
    )
    found = outcome(RIGHT + code, TESTS)
    assert found.passed
    pid = int(found.stderr.split()[0])
    for _ in range(100):  # a killed process stays until whoever inherits it looks
        if not _alive(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still running")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_surroundings(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    tests = (
        "import os, resource, sys\n"
        "assert 'SECRET' not in os.environ and 'HOME' not in os.environ\n"
        "assert os.getsid(0) == os.getpid() and sys.flags.isolated\n"
        "assert resource.getrlimit(resource.RLIMIT_AS) == (2**29, 2**29)\n"
        "assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 4096\n"
        "assert resource.getrlimit(resource.RLIMIT_NPROC)[0] == 7\n"
        "assert resource.getrlimit(resource.RLIMIT_CPU)[0] == 3\n"
        "assert 'jax' not in sys.modules and len(sys.argv) == 1\n"
        "print(os.getcwd(), file=sys.stderr)\n"
    )
    found = outcome("", tests, Limits(processor=3, memory=2**29, file=4096, processes=7))
    assert found.passed, found.stderr
    assert not os.path.exists(found.stderr.strip())


def test_no_network_where_there_is_a_namespace():
    if not execution.has_network_namespace():
        pytest.skip("unshare -rn does not work here")
    tests = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']\n"
    assert outcome("", tests).passed


def test_without_a_namespace(monkeypatch):
    monkeypatch.setattr(execution, "has_network_namespace", lambda: False)
    assert outcome(RIGHT).passed and not outcome("").passed


def test_a_child_that_never_starts_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(execution, "CHILD", tmp_path / "missing.py")
    assert outcome(RIGHT).reason == "error"
