"""Answers, statistics and the rows of the table."""

import dataclasses
import json

import pytest
from stub_table import CONFIG, KEYS, STUB, small_settings, strict

from experiments.tasks import build_tokenizer, token_spec, word_problems
from paradec_jax.evaluate.compare import compare
from paradec_jax.families import FAMILIES
from paradec_jax.store import Model


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "network", STUB)
        yield Model(CONFIG, {}, token_spec(), build_tokenizer())


@pytest.fixture(scope="module")
def result(model):
    problems = word_problems(5, seed=0, steps=(2, 2))
    stages = {}
    found = compare(
        model,
        problems,
        small_settings(),
        name="tiny",
        timed=2,
        passes=1,
        rows=3,
        report=lambda stage, done, total: stages.__setitem__(stage, (done, total)),
    )
    assert stages and all(done == total for done, total in stages.values())
    return found


def test_compare_rows(result):
    assert [row["decoder"] for row in result.rows] == ["autoregressive"] * 2 + ["wavefront"]
    assert result.labels[:2] == ["r 2", "r 4"] and result.baseline == 1
    assert result.exact.shape == (3, 5)
    for row in result.rows:
        assert set(KEYS) <= row.keys()
        assert (row["family"], row["model"], row["batch"], row["problems"]) == (
            "recurrent_depth",
            "tiny",
            1,
            5,
        )
        assert isinstance(row["exact"], int) and len(row["interval"]) == 2
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["baseline_tokens_per_second"] == result.rows[1]["tokens_per_second"]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["baseline_tokens_per_second"])
        assert row["quickest_seconds"] == row["seconds"] == row["slowest_seconds"]  # of a single pass
        assert [sum(seconds) for seconds in row["each"]] == row["passes"] and sum(row["generated"]) == row[
            "tokens"
        ]
        low, high = row["speedup_interval"]
        assert 0 < low <= high and len(row["decode_speedup_interval"]) == 2
    strict(json.dumps(result.rows, allow_nan=False))
    assert result.rows[2]["settings"]["exit_threshold"] is None  # infinite
    few, base, wave = result.rows
    assert base["speedup"] == 1.0 and base["equals_greedy"] == 1.0 and base["speedup_interval"] == [1.0, 1.0]
    assert result.facts["dtypes"] == [] and result.facts["device"]["threads"] >= 1  # a stub has no parameters
    assert few["equals_greedy"] < 1.0
    # A wave of one position that commits in every step is static decoding.
    assert wave["equals_greedy"] == 1.0
    assert wave["network_calls_per_token"] == base["network_calls_per_token"] == 1.0
    assert (few["recurrences_per_token"], base["recurrences_per_token"]) == (2.0, 4.0)
    assert wave["settings"]["window"] == 1 and base["settings"]["recurrence"] == 4


def test_compare_answers_do_not_depend_on_the_batch(model, result):
    alone = compare(
        model, word_problems(5, seed=0, steps=(2, 2)), small_settings()[1:2], timed=1, passes=1, rows=5
    )
    for key in ("exact", "tokens_per_network_call", "recurrences_per_token"):
        assert alone.rows[0][key] == result.rows[1][key]


def test_compare_refuses(model, monkeypatch):
    problems = word_problems(1)
    with pytest.raises(ValueError, match="exactly one baseline"):
        compare(model, problems, small_settings()[:1])
    with pytest.raises(ValueError, match="at least one problem"):
        compare(model, [], small_settings())
    with pytest.raises(ValueError, match="no tokenizer"):
        compare(dataclasses.replace(model, tokenizer=None), problems, small_settings())
    short = dataclasses.replace(STUB, max_length=64)
    monkeypatch.setattr(Model, "network", short)
    with pytest.raises(ValueError, match="more than the 64"):
        compare(model, problems, small_settings())


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_the_table(family):
    settings = FAMILIES[family].settings
    assert sum(setting.baseline for setting in settings) == 1
    rows = [json.dumps([setting.name, setting.settings()], allow_nan=False) for setting in settings]
    assert len(set(rows)) == len(rows)
    labels = [(setting.name, setting.label()) for setting in settings]
    assert len(set(labels)) == len(labels)
