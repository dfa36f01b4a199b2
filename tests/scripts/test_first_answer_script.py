"""`experiments.systems.first_answer` at toy size."""

from pathlib import Path

import pytest
from experiment import read, script

ROOT = Path(__file__).parents[2]


def test_a_first_answer_is_told_by_parts(models, tmp_path, capsys):
    found = script("systems/first_answer")
    out = tmp_path / "first.json"
    shared = {"decoder": "autoregressive", "model": models[0], "prompt": "0", "max_new_tokens": 3}
    found["main"](found["Options"]((ROOT,), **shared, passes=1, out=out))
    result, table = read(out)
    rows = {(row["way"], row["cache"]): row for row in result["rows"]}
    assert set(rows) == {(way, cache) for way in ("command", "library") for cache in ("cold", "warm")}
    assert len(table) == 4 and result["options"]["max_new_tokens"] == 3 and "versions" in result["facts"]
    assert (
        len({text for row in rows.values() for text in row["texts"]}) == 1
    )  # one answer, however it is asked for
    for row in rows.values():
        parts = [row[name] for name in found["PARTS"]]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["wall"]) and row["programs"] == 3
    for way in found["WAYS"]:
        assert rows[way, "cold"]["cached"] == 0 < rows[way, "warm"]["cached"]
    assert "| command |" in capsys.readouterr().out


def test_what_cannot_be_timed_is_named(tmp_path):
    found = script("systems/first_answer")
    with pytest.raises(ValueError, match="is no checkout"):
        found["Options"]((tmp_path,))
    with pytest.raises(ValueError, match="passes of at least 1, not 0"):
        found["Options"](passes=0)
    (tmp_path / "paradec_jax").mkdir()
    with pytest.raises(RuntimeError, match="failed: "):
        found["first_answer"](tmp_path, "library", ["autoregressive", "0", "none", "3"], tmp_path / "cache")
