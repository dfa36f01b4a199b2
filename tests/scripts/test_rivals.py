"""The scripts that tune the rivals of a wave, compare them and draw them against width, at toy size."""

import dataclasses
import json

import pytest
from experiment import options_of, read, script

from experiments.recurrent_depth import rival_settings as settings
from experiments.recurrent_depth.rival_times import Times, over

QUERIES, DEEP = 16, 16
WHOLE = 1 + QUERIES
SMALL = {  # what decides a test in as few programs as will do
    "autoregressive": [settings.static(r, 1) for r in (11, DEEP)],
    settings.PARALLEL[0]: [settings.jacobi(WHOLE, DEEP, False, 1)],
    settings.SEVERAL: [settings.wave(4, WHOLE, WHOLE, 0.8)],
}
TASKS = {
    "pointers": dataclasses.replace(
        settings.TASKS["pointers"], model="tiny-pointers", grid=lambda queries: SMALL, beside=(11,)
    )
}


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    """The table of the tuning script."""
    found = script("recurrent_depth/tune", TASKS=TASKS)
    path = tmp_path_factory.mktemp("tuning") / "tuning.json"
    found["main"](found["Options"]("pointers", problems=4, queries=QUERIES, timed=1, passes=1, out=path))
    return path


@pytest.fixture(scope="module")
def compared(tuning, models, tmp_path_factory):
    """The table of the rivals, and the causal model beside them."""
    found = script("recurrent_depth/rivals", TASKS=TASKS)
    found["main"].__globals__["CAUSAL"] = found["CAUSAL"][::2]
    path = tmp_path_factory.mktemp("rivals") / "rivals.json"
    options = found["Options"](
        "pointers",
        others=models[:1],
        tuning=tuning,
        problems=4,
        queries=QUERIES,
        timed=2,
        passes=2,
        out=path,
    )
    found["main"](options)
    return path


@pytest.mark.parametrize("task", settings.TASKS)
@pytest.mark.parametrize("queries", [8, 16, 64])
def test_every_rival_has_equally_many_different_settings(task, queries):
    grid = settings.TASKS[task].grid(queries)
    assert tuple(grid) == settings.RIVALS
    for of in grid.values():
        assert len(of) == len({setting.label() for setting in of}) == 6
    assert sum(setting.baseline for of in grid.values() for setting in of) == 1


def test_tuning_takes_the_fastest_of_those_that_keep_the_answers(tuning):
    result, table = read(tuning)
    rows = {(row["rival"], row["label"]): row for row in result["rows"]}
    assert len(rows) == len(table) == 4 and result["settings_tried"]["autoregressive"] == 2
    for row in rows.values():
        deep = row["settings"].get("recurrence") != 11
        assert row["exact"] == (4 if deep else 0) and row["keeps_answers"] == deep
        assert ("tokens_per_second" in row) == deep
    assert result["chosen"] == {rival: of[-1].label() for rival, of in SMALL.items()}
    assert result["options"]["model"] == "tiny-pointers" and result["facts"]["dtypes"] == ["float32"]


def test_the_rule_chooses_by_speed_and_nothing_where_answers_are_lost():
    rows = [
        {"rival": "a", "label": "slow", "keeps_answers": True, "tokens_per_second": 1.0},
        {"rival": "a", "label": "fast", "keeps_answers": True, "tokens_per_second": 2.0},
        {"rival": "a", "label": "wrong", "keeps_answers": False},
        {"rival": "b", "label": "wrong", "keeps_answers": False},
    ]
    assert script("recurrent_depth/tune")["choice"](rows) == {"a": "fast", "b": None}


def test_rivals_are_compared_with_one_baseline_and_the_best_is_named(compared, tuning):
    result, table = read(compared)
    rows, chosen = result["rows"], read(tuning)[0]["chosen"]
    assert len(table) == len(rows) and sum(row["baseline"] for row in rows) == 1 and rows[0]["baseline"]
    mine = {(row["rival"], row["label"]) for row in rows if row["model"] == "tiny-pointers"}
    assert mine >= {(rival, label) for rival, label in chosen.items() if label is not None}
    assert ("autoregressive", "r 11, prefill r 1") in mine  # loses all answers, and stands there nevertheless
    for row in rows:
        right = row["model"] == "tiny-pointers" and row["settings"].get("recurrence") != 11
        assert row["exact"] == (4 if right else 0) and row["keeps_answers"] == right
        assert ("equals_greedy" in row) == (row["model"] == "tiny-pointers")
        assert len(row["each"]) == len(row["prompt_seconds"]) == 2 and len(row["generated"]) == 2
        low, high = row["speedup_range"]
        assert 0 < low <= row["speedup"] * 1.001 and row["speedup"] <= high * 1.001
    best = max((row for row in rows if row["keeps_answers"]), key=lambda row: row["tokens_per_second"])
    assert result["best_way"] == {name: best[name] for name in ("model", "rival", "label")}
    assert result["best_sequential"]["rival"] == "autoregressive"
    four = {row["name"]: row for row in result["four_numbers"]}
    assert four[settings.ONE]["label"] is None and four[settings.SEVERAL]["over_jacobi"] > 0
    first, second = result["four_numbers"][:2]
    assert first["over_autoregressive"] == second["over_jacobi"] == 1
    assert second["rival"] == settings.PARALLEL[0]


def test_a_table_of_something_else_is_refused(tuning, tmp_path):
    found = script("recurrent_depth/rivals", TASKS=TASKS)
    cases = [
        ({"tuning": tmp_path / "none.json"}, "none.json is missing: run python -m .*tune pointers"),
        ({"tuning": tuning, "queries": 8}, "tuned with another queries"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            found["contestants"](found["Options"]("pointers", **{"queries": QUERIES, **changes}))
    table = json.loads(tuning.read_text())
    table["chosen"][settings.SEVERAL] = "inner r 99"
    (tmp_path / "old.json").write_text(json.dumps(table))
    options = found["Options"]("pointers", queries=QUERIES, tuning=tmp_path / "old.json")
    with pytest.raises(ValueError, match="inner r 99, which is no longer tried"):
        found["contestants"](options)
    with pytest.raises(ValueError, match="timed must be at least 1, not 0"):
        found["Options"]("pointers", timed=0)


def test_sides_of_a_width_follow_their_schedules(compared, tmp_path):
    found = script("recurrent_depth/rivals_width")
    options = options_of(
        found, tmp_path, widths=(32,), recurrence=4, inner=2, one=2, context=8, answer=5, tokens_per_call=2.0
    )
    found["main"](options)
    result, table = read(options.out)
    calls = {row["side"]: row["calls"] for row in result["rows"]}
    # A step more than the two that four recurrences take: 3 before the first token of a wave, then one a token; or
    # all tokens in the third.
    assert calls == {"autoregressive, r = 4": 5, "Jacobi, r = 4": 2.5, settings.ONE: 7, settings.SEVERAL: 3}
    assert len(table) == 4 and all(row["milliseconds"] > 0 for row in result["rows"])
    assert result["rows"][0]["over_autoregressive"] == 1 and options.figure.stat().st_size > 1000
    from_table = dataclasses.replace(options, tokens_per_call=None, rivals=compared, recurrence=DEEP)
    rate, source = found["tokens_per_call"](from_table)
    assert rate > 2 and settings.PARALLEL[0] in source
    for changes, message in (
        ({"recurrence": 7}, "no Jacobi decoding at r = 7"),
        ({"rivals": tmp_path / "no"}, "missing"),
    ):
        with pytest.raises(ValueError, match=message):
            found["tokens_per_call"](dataclasses.replace(from_table, **changes))
    with pytest.raises(ValueError, match="multiples of 32"):
        found["Options"](widths=(48,))


def test_speeds_leave_out_prompts_where_they_say_so():
    slow = Times([10, 12], [(1.0, 1.0), (1.0, 3.0), (2.0, 2.0)], [1.0, 1.0, 1.0], 20)
    assert slow.passes == [2.0, 4.0, 4.0] and slow.steps == [1.0, 3.0, 3.0]
    assert slow.row()["tokens_per_second"] == 22 / 4 and slow.row()["decode_tokens_per_second"] == 20 / 3
    assert slow.row()["tokens_per_second_range"] == [22 / 4, 22 / 2]
    quick = Times([10, 12], [(0.5, 0.5), (0.5, 1.5), (1.0, 1.0)], [0.5] * 3, 20)
    assert over(quick, slow, "x") == {"x": 2.0, "x_range": [2.0, 2.0]}
