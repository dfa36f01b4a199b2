"""What masked diffusion costs, and all its trainings in one command: at toy size, or by formula."""

import dataclasses
import inspect
import json

import optax
import pytest
from experiment import options_of, read, script

from experiments.common import precision
from experiments.masked_diffusion import all_runs, distill, train
from experiments.systems.report import Rates


def test_the_precision_follows_the_processor(tmp_path):
    for name, flags, wanted in (
        ("amx", "flags\t: avx2 amx_bf16 amx_tile", "BF16_BF16_F32"),
        ("avx", "flags\t: avx2 avx512_bf16", "float32"),
    ):
        (tmp_path / name).write_text(flags)
        assert precision.natural(tmp_path / name) == wanted
    assert precision.natural(tmp_path / "none") == "float32"
    recipe = train.Recipe()
    assert recipe.settled().matmul_precision == precision.natural()
    assert dataclasses.replace(recipe, matmul_precision="highest").settled().matmul_precision == "highest"
    with pytest.raises(ValueError, match="cooldown must be a share"):
        train.Recipe(cooldown=4000)


@pytest.fixture(scope="module")
def step_cost():
    found = script("masked_diffusion/step_cost")
    names = found["main"].__globals__
    small = {"preset": "test-mdlm", "layers": 1, "length": 8, "rows": 2, "steps": 3, "warmup": 1}
    names["RECIPES"] = {"tiny-mdlm": train.Recipe(**small)}
    names["DISTILLED"] = dataclasses.replace(names["DISTILLED"], rows=2)
    names["optimizer_of"] = lambda recipe, config: optax.sgd(
        recipe.learning_rate
    )  # compiled sooner than Muon
    return found


def test_what_an_update_costs(step_cost, tmp_path):
    options = step_cost["Options"](
        ("tiny-mdlm", "halves"), passes=2, vocabulary=9, minutes=2.0, out=tmp_path / "rows.json"
    )
    step_cost["main"](options)
    result, table = read(options.out)
    plain, distilled = result["rows"]
    assert [line["case"] for line in table] == ["tiny-mdlm", "halves"]
    assert distilled["flops"] / plain["flops"] == pytest.approx(
        5 / 3
    )  # two passes of the teacher more than three
    for row in (plain, distilled):
        assert row["updates_in_minutes"] == int(120 / row["seconds"]) and len(row["passes"]) == 2
        assert row["characters_in_minutes"] == 16 * row["updates_in_minutes"]
    assert result["facts"]["dtypes"] == ["float32"]


def test_cases_that_change_the_recipe(step_cost):
    for case, changes in step_cost["CHANGES"].items():
        recipe = step_cost["recipe_of"](case)
        for name, value in changes.items():
            assert name == "remat" or getattr(recipe, name) == value
    with pytest.raises(ValueError, match="no case rows-9"):
        step_cost["main"](step_cost["Options"](("rows-9",)))


@pytest.fixture
def trained(monkeypatch):
    """The folders that were trained in; the first run needs two calls."""
    calls = []

    def fake(honest):
        def main(*arguments):
            bound = inspect.signature(honest).bind(*arguments).arguments
            calls.append(bound["folder"].name)
            assert bound["recipe"].name == bound["folder"].name and bound["minutes"] == 3.0
            if len(calls) > 1:
                told = {"nats": 2.0, "kind": "bound"}
                (bound["folder"] / "held_out.json").write_text(json.dumps(told))
                if bound["export"] is not None:
                    bound["export"].mkdir(parents=True)

        return main

    for module in (train, distill):
        monkeypatch.setattr(module, "main", fake(module.main))
    return calls


def test_all_runs_go_on(trained, tmp_path):
    options = all_runs.Options(
        tmp_path / "text", runs=tmp_path / "runs", minutes=3.0, export=tmp_path / "assets"
    )
    with pytest.raises(SystemExit, match="tiny-mdlm is not done yet"):
        all_runs.main(options)
    all_runs.main(options)
    assert trained == ["tiny-mdlm", "tiny-mdlm", "tiny-rival", "tiny-judge", "halves"]
    exported = sorted(path.name for path in options.export.iterdir())
    assert exported == ["tiny-judge", "tiny-mdlm", "tiny-mdlm-distilled"]
    all_runs.main(options)
    assert len(trained) == 5
    with pytest.raises(SystemExit, match="was begun with other steps"):
        all_runs.main(dataclasses.replace(options, steps=(5, 6, 7)))
    recipes = [
        stage.recipe for stage in all_runs.stages(dataclasses.replace(options, steps=(5, 6, 7), updates=9))
    ]
    assert [recipe.steps for recipe in recipes] == [5, 6, 7, 9 * 5]


@pytest.fixture(scope="module")
def latency():
    found = script("masked_diffusion/latency", rates=lambda dtype: Rates({"sum": 1e9}, 1e9, {}))
    presets = found["MASKED_DIFFUSION_PRESETS"]
    small = {"test-mdlm": dataclasses.replace(presets["test-mdlm"], layers=1)}
    found["main"].__globals__["MASKED_DIFFUSION_PRESETS"] = presets | small
    return found


def test_latency_of_both_sides(latency, tmp_path):
    pytest.importorskip("matplotlib")
    options = options_of(latency, tmp_path, preset="test-mdlm", length=8, steps=(2,), batches=(2,))
    latency["main"](options)
    result, table = read(options.out)
    rows = result["rows"]
    assert [(row["decoder"], row["steps"], row["batch"]) for row in rows] == [
        ("autoregressive", None, 2),
        ("masked", 2, 2),
    ]
    assert len(table) == 2 and set(result["crossovers"]) == {"2"} and options.figure.stat().st_size > 1000
    for row in rows:
        assert row["tokens"] == 7 * row["batch"] and row["limit_seconds"] > 0
        assert row["network_calls"] <= (2 if row["steps"] else 7) * row["batch"]
    assert rows[0]["speedup"] == rows[0]["speedup_at_limits"] == 1
    assert rows[1]["speedup"] == rows[0]["seconds"] / rows[1]["seconds"]


def test_latency_by_formula(latency):
    """Of the 1.3B shape at the rates of an H200: about 7 and 3.5 times at batch 1, 1.1 and 0.6 times at batch 8."""
    options = latency["Options"](
        preset="mdlm-1.3b", dtype="bfloat16", rates=(4.8e12, 9.9e14), steps=(16, 32), batches=(1, 8)
    )
    rows = latency["with_ratios"](latency["predicted"](latency["denoiser_of"](options), options))
    found = {(row["steps"], row["batch"]): row["speedup"] for row in rows if row["steps"]}
    wanted = {(16, 1): 7, (32, 1): 3.5, (16, 8): 1.1, (32, 8): 0.6}
    assert found == {key: pytest.approx(value, rel=0.2) for key, value in wanted.items()}
    crossed = latency["crossovers"](rows)
    assert crossed[16] is None and 1 < crossed[32] < 8


def test_crossovers(latency):
    rows = [{"steps": 4, "batch": batch, "speedup": 8 / batch} for batch in (1, 4, 16)]
    rows += [{"steps": 2, "batch": batch, "speedup": 3.0} for batch in (1, 4, 16)]
    assert latency["crossovers"](rows) == {4: pytest.approx(8), 2: None}


def test_what_cannot_be_timed_is_refused(latency, tmp_path):
    for wrong, message in (
        ({"preset": "tiny-causal"}, "preset must be one of"),
        ({"length": 2}, "length must be from 3"),
        ({"steps": (0,)}, "at least 1"),
        ({"rates": (0.0, 1.0)}, "rates and shares must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            latency["main"](options_of(latency, tmp_path, **wrong))
