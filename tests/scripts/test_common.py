"""What scripts share: tables that go on, ratios of a machine that drifts, records, commands,
curves.
"""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest

from experiments.common import curves, plots, runner
from experiments.common.record import command, difference, write_record
from experiments.common.study import Depth, Study
from experiments.jacobi import study as jacobi
from experiments.recurrent_depth import study as recurrent_depth
from paradec_jax import facts

pytestmark = pytest.mark.slow
STUDIES = recurrent_depth.STUDIES | jacobi.STUDIES


def test_settings_of_a_study_differ():
    for name, one in STUDIES.items():
        for depth in (Depth(16), Depth(16, needed=14)):
            settings = one.settings(depth)
            keys = [runner._key(setting) for setting in settings]
            assert len(set(keys)) == len(keys), name
            assert [setting.baseline for setting in settings] == [True] + [False] * (len(keys) - 1)


def test_every_study_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    common = {
        "model": "none",
        "problems": 100,
        "interval": (0.4, 0.6),
        "recurrences_per_token": 2.0,
    }
    for name, one in STUDIES.items():
        rows = [
            common
            | {"label": runner._key(setting), "family": one.family, "exact": 50 + i % 7}
            | {"settings": setting.settings(), "tokens_per_network_call": 1.0 + i / 10}
            | {"speedup": 1.0 + i, "speedup_interval": [0.9 + i, 1.1 + i]}
            for i, setting in enumerate(one.settings(Depth(16)))
        ]
        plots.draw(one, rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


@pytest.mark.parametrize("model", ["recurrent", "causal"])
def test_a_table_goes_on_where_it_stood(model, toys, monkeypatch, tmp_path):
    recurrent = model == "recurrent"
    others = (
        [recurrent_depth.wave(1, width) for width in (1, 2)] if recurrent else [jacobi.jacobi(3)]
    )
    family = "recurrent_depth" if recurrent else "causal"
    toy = {
        "toy": Study("toy", lambda depth: others, "window" if recurrent else "block", family=family)
    }
    small = {"problems": 2, "timed": 0, "rows": 2, "budget": 4, "folder": tmp_path / "results"}
    options, decoded, honest = (
        runner.Options(("all",), model=str(toys / model), **small),
        [],
        runner.compare,
    )

    def counting(sources, problems, **options):
        decoded.append(len(sources))
        return honest(sources, problems, **options)

    monkeypatch.setattr(runner, "compare", counting)
    runner.main(toy, options)
    path = tmp_path / "results" / f"toy-{model}.json"
    table = json.loads(path.read_text())
    assert (
        len(table["rows"]) == 1 + len(others)
        and table["options"] == options.kept()
        and table["command"]
    )
    assert difference(table["facts"], facts.facts()) is None and table["facts"]["dtypes"] == [
        "float32"
    ]
    assert (tmp_path / "figures" / f"toy-{model}.png").stat().st_size > 1000
    table["rows"].popitem()
    path.write_text(json.dumps(table))
    runner.main(toy, options)
    assert decoded == [1 + len(others), 2]
    with pytest.raises(SystemExit, match="other seed"):
        runner.main(toy, dataclasses.replace(options, seed=3))


def drifting(settings, *_):
    """Stands for decoding on a machine that is half as fast in every call as in the one before."""
    drifting.speed /= 2
    made = facts.facts() | {"dtypes": ["float32"]}
    common = {
        "family": "recurrent_depth",
        "model": "m",
        "problems": 2,
        "exact": 1,
        "interval": [0.1, 0.9],
    }
    common |= {
        "baseline_tokens_per_second": drifting.speed,
        "recurrences_per_token": 1.0,
        "facts": made,
    }
    rows = {}
    for setting in settings:
        ratio = 1.0 if setting.baseline else float(setting.settings()["window"])
        speed = {
            "speedup": ratio,
            "speedup_interval": [ratio, ratio],
            "settings": setting.settings(),
        }
        rows[runner._key(setting)] = common | speed | {"tokens_per_second": ratio * drifting.speed}
    return rows


def test_rows_are_divided_by_the_baseline_that_they_were_timed_with(monkeypatch, tmp_path):
    """On a machine that drifts from group to group; a table is not timed on two machines."""
    drifting.speed = 400.0
    monkeypatch.setattr(runner, "_decode", drifting)
    monkeypatch.setattr(runner, "GROUP", 2)
    options = runner.Options(("toy",), tmp_path / "results", "tiny-recurrent-distilled", problems=2)
    one, two = (
        Study(
            "toy",
            lambda d, w=w: [recurrent_depth.wave(1, x) for x in w],
            "window",
            "momentum",
            "curves",
        )
        for w in ((2, 3, 4), (2, 3, 4, 5))
    )
    runner.main({"toy": one}, options)
    runner.main({"toy": two}, options)
    (path,) = (tmp_path / "results").glob("*.json")
    table = json.loads(path.read_text())
    lines = sorted(table["rows"].values(), key=lambda row: row["speedup"])
    assert [line["speedup"] for line in lines] == [1, 2, 3, 4, 5]
    assert len({line["baseline_tokens_per_second"] for line in lines}) == 3
    assert all(
        x["tokens_per_second"] / x["baseline_tokens_per_second"] == x["speedup"] for x in lines
    )
    table["rows"].popitem()
    table["facts"]["device"]["processor"] = "another"
    path.write_text(json.dumps(table))
    with pytest.raises(SystemExit, match=r"under other conditions: device \(processor\)"):
        runner.main({"toy": two}, options)


@dataclasses.dataclass
class Options:
    seed: int = 3
    model: str = "tiny-causal"
    out: Path = Path("some/where/rows.json")


def test_a_record_tells_of_its_machine_and_its_making(tmp_path, monkeypatch):
    path, rows = tmp_path / "new" / "rows.json", [{"a": 1, "passes": [1.0, 2.0]}]
    write_record(path, Options(), {"rows": rows}, dtypes=["float32", "bfloat16", "float32"])
    table = json.loads(path.read_text())
    assert table["rows"] == rows and table["command"].startswith("python ")
    assert table["options"] == {"seed": 3, "model": "tiny-causal", "out": "rows.json"}
    assert table["facts"].pop("dtypes") == ["bfloat16", "float32"]
    assert difference(table["facts"] | {"commit": None}, facts.facts() | {"commit": None}) is None
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.a.b"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(
        sys, "argv", ["/a/script.py", "two words", "--out=/b/c.json", "/d/e", "x/y"]
    )
    assert command() == "python -m experiments.a.b 'two words' --out=c.json e x/y"


def test_a_curve_follows_runs_one_after_the_other(tmp_path):
    pytest.importorskip("matplotlib")
    logs = {
        "a": [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}],
        "b": [{"step": 5, "loss": 1.0}],
    }
    for name, lines in logs.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = tuple(tmp_path / name for name in logs)
    assert curves.series(curves.read(paths), "loss") == [([10, 20], [3.0, 2.0]), ([25], [1.0])]
    curves.main(curves.Options(logs=paths, columns=("loss",), out=tmp_path / "new" / "x.png"))
    assert (tmp_path / "new" / "x.png").stat().st_size > 5000
