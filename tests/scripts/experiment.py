"""The scripts of `experiments/`: what they define, their options, and the tables that they write."""

import json
import runpy
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(name: str, **changes):
    """What `experiments/NAME.py` defines; `changes` take the place of names that its functions use."""
    found = runpy.run_path(str(EXPERIMENTS / f"{name}.py"), run_name=name)
    found["main"].__globals__.update(changes)
    return found


def read(path: Path):
    """The record of a script, and its rows."""
    assert not path.with_suffix(".csv").exists()
    record = json.loads(path.read_text())
    rows = record.get("rows", ())
    return record, list(rows.values()) if isinstance(rows, dict) else rows


def options_of(found, tmp_path, **changes):
    paths = {"out": tmp_path / "rows.json", "figure": tmp_path / "figures" / "rows.png"}
    return found["Options"](**{**paths, "passes": 1, **changes})
