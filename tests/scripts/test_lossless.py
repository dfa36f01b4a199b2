"""The script that holds Jacobi decoders against one-by-one decoding: what it counts, and how it goes on."""

import dataclasses
import json
import shutil

import pytest

from experiments.jacobi import lossless


@pytest.fixture
def script(monkeypatch):
    full = lossless.covering()
    pooled = next(setting for setting in full if setting.settings().get("pool") == 4)
    monkeypatch.setattr(lossless, "covering", lambda: [full[0], pooled])
    return lossless


def options_of(script, models, tmp_path, **changes):
    small = {"problems": 3, "steps": (2, 2), "budget": 5, "batches": (2, 1), "out": tmp_path / "rows.json"}
    return script.Options(models[:1], **{**small, **changes})


def test_equal_texts_are_counted_and_finished_rows_kept(script, models, tmp_path, monkeypatch):
    options = options_of(script, models, tmp_path)
    script.main(options)
    rows = json.loads(options.out.read_text())["rows"]
    assert [(row["batch"], row["settings"].get("pool")) for row in rows] == [
        (2, None),
        (2, 4),
        (1, None),
        (1, 4),
    ]
    assert all(row["equal"] == row["problems"] == 3 and row["more_calls_than_greedy"] == 0 for row in rows)
    assert all(row["tokens"] == rows[0]["tokens"] <= 15 for row in rows) and rows[0]["tokens_per_call"] == 1.0

    options.out.write_text(json.dumps(json.loads(options.out.read_text()) | {"rows": rows[:3]}))
    honest, asked = script.decode, []

    def wrong(model, setting, *rest):
        asked.append(setting.name)
        texts, calls = honest(model, setting, *rest)
        return ([texts[0][:-1], *texts[1:]], calls + 9) if setting.name == "jacobi" else (texts, calls)

    monkeypatch.setattr(script, "decode", wrong)
    with pytest.raises(SystemExit, match="1 of 4 rows have a text that differs or took more calls"):
        script.main(options)
    again = json.loads(options.out.read_text())["rows"]
    assert asked == ["autoregressive", "jacobi"] and again[:3] == rows[:3]
    assert (again[3]["equal"], again[3]["more_calls_than_greedy"]) == (2, 3)


def test_models_of_one_name_are_told_apart(script, models, tmp_path):
    """Distilled models all lie in folders named `model`; a model that was trained anew is another one."""
    places = []
    for run, source in zip("ab", models, strict=True):
        places.append(tmp_path / run / "round-0" / "model")
        shutil.copytree(source, places[-1])
    options = options_of(script, models, tmp_path, problems=1, batches=(1,), budget=2)
    options = dataclasses.replace(options, models=tuple(map(str, places)))
    script.main(options)
    rows = json.loads(options.out.read_text())["rows"]
    assert [row["model"] for row in rows] == ["a/round-0"] * 2 + ["b/round-0"] * 2
    assert len({row["model_sha256"] for row in rows}) == 2
    shutil.rmtree(places[0])
    shutil.copytree(models[1], places[0])
    script.main(options)
    assert len(json.loads(options.out.read_text())["rows"]) == 6


def test_what_cannot_be_compared_is_refused(script, models, tmp_path):
    with pytest.raises(SystemExit, match=r"must be at least 1, not \(2, 0\), 3"):
        script.main(options_of(script, models, tmp_path, batches=(2, 0)))
    other = options_of(script, models, tmp_path)
    other.out.write_text(json.dumps({"options": {"seed": 0}, "rows": []}))
    with pytest.raises(ValueError, match=r"was made with other .*seed, .*: name another file"):
        script.main(other)
    with pytest.raises(SystemExit, match="needs a causal model"):
        script.main(dataclasses.replace(other, models=("tiny-recurrent",), out=tmp_path / "none.json"))
