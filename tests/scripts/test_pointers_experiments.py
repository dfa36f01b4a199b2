"""The scripts about chains of pointers: training at toy size, and what the bundled model must show."""

import dataclasses
import json
from pathlib import Path

import pytest
from experiment import options_of, read, script

from experiments.tasks.pointers import Stage
from paradec_jax import load


@pytest.mark.slow
def test_training_writes_a_model_that_loads(tmp_path):
    found = script("recurrent_depth/pointers")
    recipe = dataclasses.replace(
        found["RECIPES"]["tiny-pointers"],
        width=16,
        heads=2,
        curriculum=(Stage(0, 4, 1, queries=2, rows=2), Stage(1, 8, 2, queries=3, rows=1)),
        updates=2,
        warmup=1,
        cooldown=1,
    )
    found["main"](recipe, tmp_path)
    log = [json.loads(line) for line in (tmp_path / "training" / "metrics.jsonl").open()]
    assert log[-2]["step"] == 2 and log[-2]["loss"] > 0 and log[-1]["wall_s"] > 0
    model = load(str(tmp_path / "model"))
    assert model.config == recipe.shape


def test_the_bundled_model_follows_one_pointer_a_recurrence(tmp_path):
    """After r recurrences names up to r - 1 look-ups away are right, none beyond; a wave agrees with r = 12."""
    found = script("recurrent_depth/pointers_speed", RECURRENCES=(5, 12))
    static, chosen = found["static"], found["chosen"]
    found["SETTINGS"]["few"] = lambda whole: [static(12, baseline=True), chosen(4, whole)]
    options = dataclasses.replace(
        options_of(found, tmp_path, problems=12, timed=1, nearest=9, widths=(32,)), passes=2
    )
    found["main"](options)
    result, table = read(options.out)
    for row in result["by_recurrence"]:
        expected = [float(distance < row["recurrence"]) for distance in range(12)]
        assert row["by_distance"] == pytest.approx(expected, abs=0.15), row
    assert result["rows"][0]["exact"] == 12
    waved = result["rows"][-1]
    assert waved["exact"] == 12 and waved["equals_greedy"] == 1 and waved["network_calls_per_token"] < 0.5
    assert [line["label"] for line in table] == [row["label"] for row in result["rows"]]
    assert options.figure.stat().st_size > 1000
    # Five calls: the prompt, and four times the whole answer.
    (cost,) = result["costs"]
    assert cost["wave_steps"] == pytest.approx(4, abs=0.2) and len(cost["wave_passes"]) == 2
    low, high = cost["speedup_without_prompts_interval"]
    assert 0 < low <= cost["speedup_without_prompts"] <= high


def test_tables_of_another_split_or_model_take_no_others_place():
    options = script("recurrent_depth/pointers_speed")["Options"]
    assert options().place.name == "pointers.json" and options().drawn.name == "pointers.png"
    assert options("wide-pointers").place.name == "wide-pointers.json"
    tune = options(split="tune")
    assert tune.place.name == "pointers-tune.json" and tune.drawn is None
    named = options(split="tune", out=Path("a.json"), figure=Path("b.png"))
    assert named.told()["out"] == Path("a.json") == named.place and named.drawn == Path("b.png")


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="settings must be one of wide, few"):
        script("recurrent_depth/pointers_speed")["Options"](settings="some")
