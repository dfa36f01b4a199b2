"""Benchmarks over local files: every task reaches a score; generated code is judged in a process of
its own.
"""

import contextlib
import gzip
import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
from toys import of_words

from experiments.lm_eval import execution, judges, run
from experiments.lm_eval.execution import Limits, execute
from paradec_jax.store import save

pytestmark = pytest.mark.slow
DATA = os.environ.get("PARADEC_DATA")
RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(0) == 0\n"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")
with_data = pytest.mark.skipif(
    DATA is None, reason="PARADEC_DATA names no folder of benchmark files"
)


def outcome(code, tests=TESTS, limits=Limits(processor=1, wall=20.0)):  # noqa: B008
    found = execute(code, tests, limits)
    return found.reason, found.stderr


@on_linux
@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (RIGHT, "passed", ""),
        (
            RIGHT + "if __name__ == '__main__':\n    raise SystemExit('not for tests')\n",
            "passed",
            "",
        ),
        (RIGHT + "import os, sys\nos.write = os._exit = sys.exit = print = None\n", "passed", ""),
        ("def double(x):\n    return x\n", "failed", "AssertionError"),
        (RIGHT + "'''", "failed", "SyntaxError"),  # must not swallow the tests
        ("def double(x):\n    return len('a' * 2**31)\n", "failed", "MemoryError"),
        ("def double(x):\n    open('f', 'wb').write(bytes(2**25))\n", "failed", "too large"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "failed", "SIGSEGV"),
        (
            RIGHT + "print('passed'); import os; os._exit(0)\n",
            "failed",
            "",
        ),  # an early end is no pass
        (RIGHT + "import os\nif os.fork():\n    os._exit(0)\n", "failed", ""),
        (RIGHT + "import os\nos.execv('/bin/true', ['true'])\n", "failed", ""),
        ("def double(x):\n    while True:\n        pass\n", "timeout", ""),
    ],
)
def test_code_passes_fails_or_takes_too_long(code, reason, message):
    found, stderr = outcome(code)
    assert found == reason and message in stderr and len(stderr) < 2100, stderr


@on_linux
def test_nothing_of_the_sample_outlives_it_and_nothing_of_the_host_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    code = (
        "import os, resource, subprocess, sys\n"
        "assert 'SECRET' not in os.environ and 'HOME' not in os.environ and 'jax' not in sys.modules\n"
        "assert resource.getrlimit(resource.RLIMIT_AS) == (2**29, 2**29)\n"
        "assert resource.getrlimit(resource.RLIMIT_NPROC)[0] == 7\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, os.getcwd(), file=sys.stderr)\n"
    )
    reason, stderr = outcome("", code, Limits(processor=3, memory=2**29, processes=7))
    assert reason == "passed", stderr
    pid, folder = stderr.split()[:2]
    assert not os.path.exists(folder)
    for _ in range(100):  # a killed process stays until whoever inherits it looks
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} is still running")


@on_linux
def test_there_is_no_network_and_it_works_without_a_namespace(monkeypatch):
    if execution.has_network_namespace():
        assert (
            outcome(
                "", "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']\n"
            )[0]
            == "passed"
        )
    monkeypatch.setattr(execution, "has_network_namespace", lambda: False)
    assert [outcome(code)[0] for code in (RIGHT, "")] == ["passed", "failed"]


@on_linux
def test_code_is_judged_by_its_tests():
    function = {"prompt": "def double(x):\n", "entry_point": "double"}
    function["test"] = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert [judges.humaneval(function, [f"    return {n} * x\n"])["pass@1"] for n in (2, 1)] == [
        1.0,
        0.0,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of 8,192 positions with the tokens of the word problems, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "random"
    save(folder, of_words("test-causal", 0, max_length=8192))
    return folder


@pytest.mark.peers
@on_linux
@with_data
@pytest.mark.parametrize(
    ("name", "file", "scores"),
    [
        ("gsm8k", "gsm8k/test.jsonl", ("exact_match,strict", "exact_match,flexible")),
        ("humaneval", "humaneval/HumanEval.jsonl.gz", ("pass@1,none",)),
        ("mbpp", "mbpp/mbpp.jsonl", ("pass@1,none",)),
        ("mbpp", "mbpp/sanitized-mbpp.json", ("pass@1,none",)),
        ("lambada", "lambada/lambada_test.jsonl", ("perplexity,none", "acc,none")),
        ("math500", None, ("exact_match,none",)),
    ],
)
def test_five_items_of_each_file_reach_a_score(model, tmp_path, monkeypatch, name, file, scores):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pytest.importorskip("lm_eval")
    path = tmp_path / "math.jsonl" if file is None else Path(DATA) / file
    if file is None:  # no such file may be handed on: an item of our own
        path.write_text(json.dumps({"problem": "What is $1 + 1$?", "answer": "2"}) + "\n")
    more = {"shots": 3, "examples": path.with_name("train.jsonl")} if name == "gsm8k" else {}
    out = tmp_path / "out.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.main(
            run.Options(name, path, str(model), limit=5, execute=True, rows=5, out=out, **more)
        )
    told = json.loads(out.read_text())
    (found,), (samples,) = told["results"].values(), told["samples"].values()
    assert len({sample["doc_id"] for sample in samples}) == (1 if file is None else 5)
    assert all(
        isinstance(found[score], float) and f"{score}: " in printed.getvalue() for score in scores
    )
    assert found[scores[-1]] == 0.0, "a random model is never right"


@pytest.mark.peers
@on_linux
@with_data
def test_reference_answers_are_right():
    """Every thirtieth item of each file of code, with the code that comes with it."""
    datasets = pytest.importorskip("datasets")
    with gzip.open(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        for doc in [json.loads(line) for line in lines][::30]:
            assert judges.humaneval(doc, [doc["canonical_solution"]])["pass@1"], doc["task_id"]
    lines = (Path(DATA) / "mbpp" / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    asked = [row for row in rows if row["task_id"] in judges.TASKS]
    docs = judges.mbpp_docs(datasets.Dataset.from_list(rows))
    assert len(docs) == len(asked) == 500
    for i in (*range(0, 500, 60), 356):  # the setup of the last one needs the candidate's code
        assert judges.mbpp(docs[i], [asked[i]["code"]])["pass@1"], asked[i]["task_id"]
