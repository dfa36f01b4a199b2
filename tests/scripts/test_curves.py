"""Learning curves: where the points lie, and what is refused."""

import json
from pathlib import Path

import pytest

from experiments.common import curves


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_follow_one_another(tmp_path):
    first = write(tmp_path / "a", {"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0, "eval/loss": 5.0})
    second = write(tmp_path / "b", {"step": 5, "loss": 1.0, "eval/loss": 4.0})
    runs = curves.read([first, second])
    assert curves.series(runs, "loss") == [([10, 20], [3.0, 2.0]), ([25], [1.0])]
    assert curves.series(runs, "eval/loss") == [([20], [5.0]), ([25], [4.0])]
    with pytest.raises(ValueError, match="no column gain; there are eval/loss, loss"):
        curves.series(runs, "gain")
    with pytest.raises(ValueError, match="is empty"):
        curves.read([write(tmp_path / "c")])


def test_lines_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"step": 1, "note": "one\u2028two"}\n\n{"step": 2', "utf-8")
    with pytest.raises(ValueError, match=f"line 3 of {path} is not JSON"):
        curves.read([path])
    path.write_text('{"step": 1, "note": "one\u2028two"}\n', "utf-8")
    assert curves.read([path]) == [[{"step": 1, "note": "one\u2028two"}]]


def test_a_picture_of_a_log(tmp_path):
    pytest.importorskip("matplotlib")
    log = write(tmp_path / "log", *({"step": i, "loss": 1 / i, "accuracy": i / 9} for i in range(1, 9)))
    curves.main(curves.Options(logs=(log,), out=tmp_path / "new" / "x.png"))
    assert (tmp_path / "new" / "x.png").stat().st_size > 5000
