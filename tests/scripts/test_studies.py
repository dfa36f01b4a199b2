"""Studies: every setting of every table is valid, tables are resumed, and pictures drawn."""

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from experiments.common import plots, runner
from experiments.common.study import Depth, Study
from experiments.jacobi import study as jacobi
from experiments.recurrent_depth import study as recurrent_depth
from paradec_jax import facts
from paradec_jax.evaluate import pointer_problems, word_problems
from paradec_jax.evaluate.compare import Comparison

ROOT = Path(__file__).parents[2]
STUDIES = recurrent_depth.STUDIES | jacobi.STUDIES


def options_of(*names, **changes):
    return runner.Options(names, **{"folder": Path("results"), **changes})


def test_settings_of_a_study_differ():
    for name, one in STUDIES.items():
        for depth in (Depth(16), Depth(16, needed=14)):
            settings = one.settings(depth)
            keys = [runner._key(setting) for setting in settings]
            assert len(set(keys)) == len(keys), name
            assert [setting.baseline for setting in settings] == [True] + [False] * (len(keys) - 1)


def test_waves_are_as_wide_as_tokens_are_slow():
    """The widths of the tables that were made for models that need few recurrences, and of one that needs many."""
    shallow, deep = Depth(16), Depth(16, needed=14)
    assert [shallow.width(inner) for inner in (1, 2, 4, 8)] == [8, 5, 3, 3]
    assert [deep.width(inner) for inner in (1, 2, 4, 8)] == [16, 9, 5, 3]
    assert shallow.widths[-1] == 8 and deep.widths[-1] == 16


def test_pointers_are_right_as_a_whole():
    options = options_of("table1", task="pointers", nearest=5, problems=3)
    problems = runner.draw(options)
    items = pointer_problems(3, seed=options.seed, nearest=5)
    assert problems.prompts == [item.prompt for item in items]
    texts = [items[0].solution, items[1].solution + " Ana", items[1].solution]
    assert problems.score(problems.prompts, texts).tolist() == [True, False, False]
    assert problems.budget == len(items[0].solution.split()) + 1
    assert options.kept() != dataclasses.replace(options, nearest=6).kept()


def test_a_study_goes_on_where_it_stood(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    options = options_of("toy", problems=2, timed=0, rows=2, folder=tmp_path / "results", budget=4)
    waves = [recurrent_depth.wave(1, width) for width in (1, 2)]
    toy = {"toy": Study("toy", lambda d: waves, "exit_threshold", "window", "curves")}
    decoded = []
    honest = runner.compare

    def counting(model, problems, settings, **options):
        decoded.append(len(settings))
        return honest(model, problems, settings, **options)

    monkeypatch.setattr(runner, "compare", counting)
    monkeypatch.setattr(runner, "GROUP", 1)
    runner.main(toy, options)
    assert decoded == [2, 2]
    table = json.loads((tmp_path / "results" / "toy-tiny-recurrent.json").read_text())
    assert next(iter(table["rows"])) == "autoregressive, r 16" and len(table["rows"]) == 3
    windows = [row["settings"].get("window") for row in table["rows"].values()]
    assert windows == [None, 1, 2]
    assert (tmp_path / "figures" / "toy-tiny-recurrent.png").stat().st_size > 1000

    assert table["options"] == options.kept() and table["command"]
    assert facts.difference(table["facts"], facts.facts()) is None and table["facts"]["dtypes"] == ["float32"]
    assert all(facts.difference(row["facts"], table["facts"]) is None for row in table["rows"].values())

    table["rows"].popitem()
    (tmp_path / "results" / "toy-tiny-recurrent.json").write_text(json.dumps(table))
    decoded.clear()
    runner.main(toy, options)
    assert decoded == [2]
    with pytest.raises(SystemExit, match="other seed"):
        runner.main(toy, dataclasses.replace(options, seed=3))


class Drifting:
    """Stands for `compare` on a machine that is half as fast in every call as in the one before."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, problems, settings, *, seed, **options):
        self.calls += 1
        base = 400.0 / 2**self.calls
        rows = []
        for setting in settings:
            ratio = 1.0 if setting.baseline else float(setting.settings()["window"])
            own = {
                "settings": setting.settings(),
                "decoder": setting.name,
                "model": "m",
                "family": "recurrent_depth",
            }
            answers = {"problems": 2, "exact": 1, "interval": [0.1, 0.9], "difference_interval": [-0.5, 0.5]}
            speed = {"tokens_per_second": ratio * base, "baseline_tokens_per_second": base, "speedup": ratio}
            speed |= {"speedup_interval": [0.9 * ratio, 1.1 * ratio], "recurrences_per_token": 1.0}
            rows.append(own | answers | speed)
        made = facts.facts() | {"dtypes": ["float32"]}
        labels = [setting.label() for setting in settings]
        return Comparison(rows, labels, 0, np.ones((len(rows), 2), bool), made)


def test_rows_are_divided_by_the_baseline_that_they_were_timed_with(monkeypatch, tmp_path):
    """On a machine that drifts from group to group, and again from one run of a study to the next."""
    pytest.importorskip("matplotlib")
    drawn = {}
    honest = plots._curves

    def keep(figure, *rest):
        honest(figure, *rest)
        drawn.update({panel.get_ylabel(): panel for panel in figure.axes})

    monkeypatch.setattr(plots, "_curves", keep)
    monkeypatch.setattr(runner, "compare", Drifting())
    monkeypatch.setattr(runner, "GROUP", 2)
    options = options_of("toy", problems=2, folder=tmp_path / "results")
    for widths in ((2, 3, 4), (2, 3, 4, 5)):
        toy = Study(
            "toy", lambda d, w=widths: [recurrent_depth.wave(1, x) for x in w], "window", "momentum", "curves"
        )
        runner.main({"toy": toy}, options)
    table = json.loads((tmp_path / "results" / "toy-tiny-recurrent.json").read_text())
    lines = sorted(table["rows"].values(), key=lambda row: row["speedup"])
    assert [line["speedup"] for line in lines] == [1, 2, 3, 4, 5]
    assert len({line["baseline_tokens_per_second"] for line in lines}) == 3
    for line in lines:
        assert line["tokens_per_second"] / line["baseline_tokens_per_second"] == line["speedup"]
        low, high = line["speedup_interval"]
        assert low < line["speedup"] < high
    (line, *_) = drawn[plots.SPEED].lines
    assert line.get_ydata().tolist() == [2, 3, 4, 5]


def test_a_table_is_not_timed_on_two_machines(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "compare", Drifting())
    options = options_of("toy", problems=2, folder=tmp_path / "results")
    one, two = (Study("toy", lambda d, w=w: [recurrent_depth.wave(1, x) for x in w]) for w in ((2,), (2, 3)))
    runner.main({"toy": one}, options)
    path = tmp_path / "results" / "toy-tiny-recurrent.json"
    table = json.loads(path.read_text())
    table["facts"]["commit"] = "another"  # each row tells its own
    path.write_text(json.dumps(table))
    runner.main({"toy": one}, options)
    table["facts"]["device"]["processor"] = "another"
    path.write_text(json.dumps(table))
    runner.main({"toy": one}, options)  # nothing is missing, and nothing is timed
    with pytest.raises(SystemExit, match=r"under other conditions: device \(processor\)"):
        runner.main({"toy": two}, options)


def test_tuning_problems_have_tables_of_their_own(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    options = options_of("toy", problems=3, folder=tmp_path / "results")
    tuning = dataclasses.replace(options, split="tune")
    test, tune = (runner.draw(of).prompts for of in (options, tuning))
    assert test == word_problems(3, seed=2, steps=(2, 4)) and tune == word_problems(
        3, seed=2, steps=(2, 4), split="tune"
    )
    pointers = dataclasses.replace(tuning, task="pointers")
    assert runner.draw(pointers).prompts == [x.prompt for x in pointer_problems(3, seed=2, split="tune")]
    monkeypatch.setattr(runner, "compare", Drifting())
    toy = {"toy": Study("toy", lambda d: [recurrent_depth.wave(1, 2)])}
    for of in (options, tuning):
        runner.main(toy, of)
    names = sorted(path.name for path in (tmp_path / "results").glob("*.json"))
    assert names == ["toy-tiny-recurrent-tune.json", "toy-tiny-recurrent.json"]
    assert json.loads((tmp_path / "results" / names[0]).read_text())["options"]["split"] == "tune"
    assert [path.name for path in (tmp_path / "figures").glob("*")] == ["toy-tiny-recurrent.png"]


@pytest.mark.slow
def test_every_study_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for name, one in STUDIES.items():
        rows = [
            {
                "label": runner._key(setting),
                "model": "none",
                "family": one.family,
                "problems": 100,
                "exact": 50 + i % 7,
                "interval": (0.4, 0.6),
                "settings": setting.settings(),
                "speedup": 1.0 + i,
                "speedup_interval": [0.9 + i, 1.1 + i],
                "tokens_per_network_call": 1.0 + i / 10,
                "recurrences_per_token": 2.0,
            }
            for i, setting in enumerate(one.settings(Depth(16)))
        ]
        plots.draw(one, rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_options_that_say_nothing_together_are_refused():
    with pytest.raises(ValueError, match="nearest"):
        options_of("table1", nearest=3)


def test_an_unknown_study_is_refused():
    with pytest.raises(SystemExit, match="no study tables: choose of table1"):
        runner.main(STUDIES, options_of("tables"))


@pytest.mark.parametrize("paper", ["recurrent_depth", "jacobi"])
def test_tables_go_to_the_folder_of_the_paper(paper, monkeypatch):
    """The defaults of its command line; what it wrote lies there."""
    asked = []
    monkeypatch.setattr(runner, "main", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr("sys.argv", ["study", "all", "--problems", "3"])
    runpy.run_path(str(ROOT / "experiments" / paper / "study.py"), run_name="__main__")
    ((studies, options),) = asked
    assert (options.study, options.problems) == (("all",), 3)
    written = {
        path.name.partition("-")[0] for path in (ROOT / options.folder).glob(f"*-{options.model}.json")
    }
    assert written & studies.keys()
