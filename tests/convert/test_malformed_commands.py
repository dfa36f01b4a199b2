"""Input that is wrong, and converters that are killed, as commands of their own: counts for `make cluster`."""

import collections
import concurrent.futures
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from malformed_cases import cases
from malformed_changes import Case, fault, listed
from malformed_models import write_models

from convert.cli import STOPPED, main
from paradec_jax import store

ROOT = Path(__file__).parents[2]
PROGRAMS = {"import": "convert", "check": "convert", "generate": "paradec_jax.cli"}
MOST_SECONDS = 10  # of processor time, which other processes do not lengthen
MOST_MEBIBYTES = 2048
TOO_LONG, TOO_LARGE = 300, 4096  # seconds of wall time, and MiB, at which a command is killed
WORKERS = int(os.environ.get("PARADEC_WORKERS", "2"))

pytestmark = pytest.mark.cluster


@dataclasses.dataclass
class Ended:
    """How a command ended: its exit code, what it told, what it took, and what it left in the scratch folder."""

    code: int
    told: str
    seconds: float
    mebibytes: float
    scratch: list[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """All models, whole."""
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


def started(words: list[str], folder: Path, told: Any, **more: Any) -> subprocess.Popen:
    """A command in a folder, with a scratch folder of its own beside it."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder.with_name("scratch")),
        "RUST_BACKTRACE": "1",
    }
    program = [sys.executable, "-m", PROGRAMS[words[0]], *words]
    devnull = subprocess.DEVNULL
    return subprocess.Popen(
        program, cwd=folder, env=os.environ | settings, stdout=devnull, stderr=told, **more
    )


def run(words: list[str], folder: Path, stdin: bytes = b"") -> Ended:
    """Runs a command to its end; one that hangs or grows without end is killed."""
    scratch, told, given = (folder.with_name(name) for name in ("scratch", "told", "given"))
    scratch.mkdir()
    given.write_bytes(stdin)
    with told.open("wb") as err, given.open("rb") as standard_input:
        child = started(words, folder, err, stdin=standard_input)
        begun, pid = time.monotonic(), 0
        while not pid:
            time.sleep(0.02)
            if time.monotonic() - begun > TOO_LONG or _resident(child.pid) > TOO_LARGE:
                os.kill(child.pid, signal.SIGKILL)  # which does not reap it, as Popen.kill may
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        child.returncode = os.waitstatus_to_exitcode(status)
    text = told.read_text(encoding="utf-8", errors="replace")
    seconds = usage.ru_utime + usage.ru_stime
    return Ended(child.returncode, text, seconds, usage.ru_maxrss / 1024, listed(scratch))


def _resident(pid: int) -> float:
    """MiB of a process's memory."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def judged(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """What a case came to; `fault` is None where all was as it must be."""
    work = folder / "work"
    shutil.copytree(models / case.base, work / "source")
    case.change(work / "source")
    (work / "out").mkdir()
    before, target = listed(work), work / "out" / "model"
    ended = run(case.words(work / "source", target, models / "recording" / "logits.npz"), work, case.stdin)
    found = fault(case, ended.code, ended.told, before, listed(work))
    if found is None and ended.seconds > MOST_SECONDS:
        found = f"{ended.seconds:.1f} s"
    if found is None and ended.mebibytes > MOST_MEBIBYTES:
        found = f"{ended.mebibytes:.0f} MiB"
    if found is None and ended.scratch:
        found = f"left in the scratch folder: {ended.scratch[:3]}"
    if found is None and ended.code == 0 and case.command == "import" and case.base == "ckpt":
        whole = models / "imported-ckpt"
        found = None if store.fingerprint(target) == store.fingerprint(whole) else "wrong values"
    shutil.rmtree(folder)
    took = {"seconds": round(ended.seconds, 2), "mebibytes": round(ended.mebibytes)}
    return {"name": case.name, "command": case.command, "code": ended.code, "fault": found} | took


def test_every_malformed_input_is_one_sentence(models, tmp_path, record_property):
    """300 and more: exit 1 or 2, one sentence, 10 s, 2 GiB, nothing left, no code run."""
    assert main(["import", str(models / "ckpt" / "last.ckpt"), str(models / "imported-ckpt")]) == 0
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        folders = (tmp_path / str(i) for i in range(10**6))
        mixed = random.Random(0).sample(cases(), len(cases()))  # so that any part of them has all kinds
        found = []
        with (tmp_path / "cases.jsonl").open("w") as file:
            for row in pool.map(judged, mixed, [models] * len(mixed), folders):
                found.append(row)
                print(json.dumps(row), file=file, flush=True)
    for command in PROGRAMS:
        rows = [row for row in found if row["command"] == command]
        refused = [row for row in rows if row["code"] in (1, 2)]
        counts = {
            "cases": len(rows),
            "held": sum(row["fault"] is None for row in rows),
            "refused": len(refused),
            "taken, since nothing that counts was hit": sum(row["code"] == 0 for row in rows),
            "most seconds": max(row["seconds"] for row in rows),
            "most MiB": max(row["mebibytes"] for row in rows),
        }
        record_property("cluster", {"part": "malformed input", "what": command, **counts})
    faults = {row["name"]: row["fault"] for row in found if row["fault"] is not None}
    assert not faults, json.dumps(faults, indent=1)
    assert sum(row["code"] in (1, 2) for row in found) >= 300


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_killed_converters(kind, models, tmp_path, record_property):
    """At 10 random moments: a folder is whole or absent; SIGTERM leaves nothing, the next writer clears the rest."""
    words = ["import", str(models / "qwen2"), str(tmp_path / "work" / "model")]
    (tmp_path / "work").mkdir()
    begun = time.monotonic()
    assert run(words, tmp_path / "work").code == 0
    whole, length = listed(tmp_path / "work"), time.monotonic() - begun
    rng, seen = random.Random(0), collections.Counter[str]()
    for _ in range(10):
        for name in ("work", "scratch"):
            shutil.rmtree(tmp_path / name)
            (tmp_path / name).mkdir()
        child = started(words, tmp_path / "work", subprocess.DEVNULL)
        time.sleep(rng.uniform(0, length))
        child.send_signal(kind)
        code = child.wait()
        left = listed(tmp_path / "work")
        seen["ended before" if code == 0 else "killed"] += 1
        if kind == signal.SIGTERM:
            assert code in (0, -kind, STOPPED) and left in ([], whole)
        if (tmp_path / "work" / "model").exists():
            store.load(tmp_path / "work" / "model", host=True)
        assert main([*words, "--overwrite"]) == 0 and listed(tmp_path / "work") == whole
    counts = {"cases": 10, "held": seen.total(), **seen}
    record_property("cluster", {"part": "killed converters", "what": kind.name, **counts})
