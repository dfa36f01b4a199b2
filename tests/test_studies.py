"""Studies: every setting of every table is valid, tables are resumed, and pictures drawn."""

import csv
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def study(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("study")
    for name in ("study", "studies", "jacobi_studies", "plots"):
        sys.modules.pop(name)


def test_settings_of_a_study_differ(study):
    for name, one in study.STUDIES.items():
        keys = [study._key(setting) for setting in one.settings(16)]
        assert len(set(keys)) == len(keys), name
        assert [setting.baseline for setting in one.settings(16)] == [True] + [False] * (len(keys) - 1)


def test_a_study_goes_on_where_it_stood(study, monkeypatch, tmp_path):
    options = study.Options(("toy",), problems=2, timed=0, rows=2, folder=tmp_path / "results", budget=4)
    two = study.Study("toy", lambda r: [study_wave(1), study_wave(2)], "exit_threshold", "width", "curves")
    study_wave = lambda width: sys.modules["studies"].wave(1, width)  # noqa: E731
    monkeypatch.setitem(study.STUDIES, "toy", two)
    decoded = []
    honest = study.compare

    def counting(model, problems, settings, **options):
        decoded.append(len(settings))
        return honest(model, problems, settings, **options)

    monkeypatch.setattr(study, "compare", counting)
    monkeypatch.setattr(study, "GROUP", 1)
    study.main(options)
    assert decoded == [2, 2]
    table = json.loads((tmp_path / "results" / "toy-tiny-recurrent.json").read_text())
    assert next(iter(table["rows"])) == "autoregressive, r 16" and len(table["rows"]) == 3
    with (tmp_path / "results" / "toy-tiny-recurrent.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["width"] for line in lines] == ["", "1", "2"]
    assert (tmp_path / "figures" / "toy-tiny-recurrent.png").stat().st_size > 1000

    table["rows"].popitem()
    (tmp_path / "results" / "toy-tiny-recurrent.json").write_text(json.dumps(table))
    decoded.clear()
    study.main(options)
    assert decoded == [2]
    with pytest.raises(SystemExit, match="other seed"):
        study.main(study.dataclasses.replace(options, seed=3))


def test_an_unknown_study_is_refused(study):
    with pytest.raises(SystemExit, match="no study tables: choose of table1"):
        study.main(study.Options(("tables",)))
