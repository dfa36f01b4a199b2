"""Studies: every setting of every table is valid, tables are resumed, and pictures drawn."""

import csv
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def study(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("study")
    for name in ("study", "studies", "jacobi_studies", "plots"):
        sys.modules.pop(name)


def test_settings_of_a_study_differ(study):
    for name, one in study.STUDIES.items():
        for depth in (study.Depth(16), study.Depth(16, needed=14)):
            settings = one.settings(depth)
            keys = [study._key(setting) for setting in settings]
            assert len(set(keys)) == len(keys), name
            assert [setting.baseline for setting in settings] == [True] + [False] * (len(keys) - 1)


def test_waves_are_as_wide_as_tokens_are_slow(study):
    """The widths of the tables that were made for models that need few recurrences, and of one that needs many."""
    shallow, deep = study.Depth(16), study.Depth(16, needed=14)
    assert [shallow.width(inner) for inner in (1, 2, 4, 8)] == [8, 5, 3, 3]
    assert [deep.width(inner) for inner in (1, 2, 4, 8)] == [16, 9, 5, 3]
    assert shallow.widths[-1] == 8 and deep.widths[-1] == 16


def test_pointers_are_right_as_a_whole(study):
    options = study.Options(("table1",), task="pointers", nearest=5, problems=3)
    problems = study.draw(options)
    items = study.pointer_problems(3, seed=options.seed, nearest=5)
    assert problems.prompts == [item.prompt for item in items]
    texts = [items[0].solution, items[1].solution + " Ana", items[1].solution]
    assert problems.score(problems.prompts, texts).tolist() == [True, False, False]
    assert problems.budget == len(items[0].solution.split()) + 1
    assert options.facts() != study.dataclasses.replace(options, nearest=6).facts()
    assert "task" not in study.Options(("table1",)).facts()


def test_a_study_goes_on_where_it_stood(study, monkeypatch, tmp_path):
    options = study.Options(("toy",), problems=2, timed=0, rows=2, folder=tmp_path / "results", budget=4)
    two = study.Study("toy", lambda d: [study_wave(1), study_wave(2)], "exit_threshold", "window", "curves")
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
    assert [line["window"] for line in lines] == ["", "1", "2"]
    assert (tmp_path / "figures" / "toy-tiny-recurrent.png").stat().st_size > 1000

    table["rows"].popitem()
    (tmp_path / "results" / "toy-tiny-recurrent.json").write_text(json.dumps(table))
    decoded.clear()
    study.main(options)
    assert decoded == [2]
    with pytest.raises(SystemExit, match="other seed"):
        study.main(study.dataclasses.replace(options, seed=3))


@pytest.mark.slow
def test_every_study_can_be_drawn(study, tmp_path):
    for name, one in study.STUDIES.items():
        rows = [
            {
                "label": study._key(setting),
                "model": "none",
                "family": one.family,
                "problems": 100,
                "exact": 50 + i % 7,
                "interval": (0.4, 0.6),
                "settings": setting.settings(),
                "tokens_per_second": 100.0 + i,
                "tokens_per_network_call": 1.0 + i / 10,
                "recurrences_per_token": 2.0,
            }
            for i, setting in enumerate(one.settings(study.Depth(16)))
        ]
        study.plots.draw(one, rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_options_that_say_nothing_together_are_refused(study):
    with pytest.raises(ValueError, match="a file of problems"):
        study.Options(("table1",), task="pointers", file=Path("problems.jsonl"))
    with pytest.raises(ValueError, match="nearest"):
        study.Options(("table1",), nearest=3)


def test_an_unknown_study_is_refused(study):
    with pytest.raises(SystemExit, match="no study tables: choose of table1"):
        study.main(study.Options(("tables",)))
