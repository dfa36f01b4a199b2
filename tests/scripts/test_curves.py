"""Learning curves: where the points lie, and what is refused."""

import json
import runpy
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(EXPERIMENTS / "curves.py"), run_name="curves")


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_follow_one_another(script, tmp_path):
    first = write(tmp_path / "a", {"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0, "eval/loss": 5.0})
    second = write(tmp_path / "b", {"step": 5, "loss": 1.0, "eval/loss": 4.0})
    runs = script["read"]([first, second])
    assert script["series"](runs, "loss") == [([10, 20], [3.0, 2.0]), ([25], [1.0])]
    assert script["series"](runs, "eval/loss") == [([20], [5.0]), ([25], [4.0])]
    with pytest.raises(ValueError, match="no column gain; there are eval/loss, loss"):
        script["series"](runs, "gain")
    with pytest.raises(ValueError, match="is empty"):
        script["read"]([write(tmp_path / "c")])


def test_a_picture_of_a_log(script, tmp_path):
    pytest.importorskip("matplotlib")
    log = write(tmp_path / "log", *({"step": i, "loss": 1 / i, "accuracy": i / 9} for i in range(1, 9)))
    script["main"](script["Options"](logs=(log,), out=tmp_path / "new" / "x.png"))
    assert (tmp_path / "new" / "x.png").stat().st_size > 5000


def test_every_bundled_log_has_its_columns(script):
    for logs, columns in script["BUNDLED"].values():
        runs = script["read"]([EXPERIMENTS / "logs" / f"{log}.jsonl" for log in logs])
        for column in columns:
            assert all(len(steps) > 20 for steps, _ in script["series"](runs, column))
