"""Answers, statistics and the rows of the table."""

import dataclasses
import json

import numpy as np
import pytest
from stub_table import CONFIG, KEYS, STUB, small_settings, strict

from experiments.tasks import build_tokenizer, token_spec, word_problems
from paradec_jax.evaluate import compare, paired, ratio, wilson
from paradec_jax.families import FAMILIES
from paradec_jax.store import Model


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "network", STUB)
        yield Model(CONFIG, {}, token_spec(), build_tokenizer())


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.255267, 0.366195),  # Newcombe 1998, table I: 0.2553, 0.3662
        (15, 148, 0.062401, 0.160536),  # 0.0624, 0.1605
        (0, 20, 0.0, 0.161125),  # 0.0000, 0.1611
        (1, 29, 0.006113, 0.171756),  # 0.0061, 0.1718
        (29, 29, 0.883031, 1.0),
    ],
)
def test_wilson(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_refuses():
    for successes, trials in ((0, 0), (3, 2), (-1, 4)):
        with pytest.raises(ValueError, match="trial"):
            wilson(successes, trials)


def test_paired():
    first = np.asarray([1, 1, 1, 1, 1, 1, 0, 0, 0, 1], bool)
    second = np.asarray([1, 1, 0, 0, 0, 0, 0, 0, 1, 1], bool)
    found = paired(first, second)
    assert (found.only_first, found.only_second) == (4, 1)
    assert found.difference == pytest.approx(0.3)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 32)
    assert found.interval[0] < 0.3 < found.interval[1]
    other = paired(second, first)
    assert other.interval == pytest.approx((-found.interval[1], -found.interval[0]))
    same = paired(first, first)
    assert (same.difference, same.p_value) == (0.0, 1.0)
    assert same.interval[0] < 0 < same.interval[1]
    with pytest.raises(ValueError, match="one length"):
        paired(first, second[:-1])


def test_paired_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        both = rng.random((2, 120))
        first, second = both[0] < 0.9, (both[0] < 0.85) ^ (both[1] < 0.03)
        truth = 0.9 - (0.85 * 0.97 + 0.15 * 0.03)
        low, high = paired(first, second).interval
        covered += low <= truth <= high
    assert covered >= 0.92 * 400


def test_interval_of_a_ratio():
    """By hand, at its limits, and how often it holds the true ratio of 5 tokens a call."""
    spread = 1.959964 * np.sqrt(3 / 2 * (1 + 1 + 0)) / 6  # R = 2, tokens - 2 calls: -1, 1, 0
    assert ratio(np.array([1, 5, 6]), np.array([1, 2, 3])) == pytest.approx((2 - spread, 2 + spread))
    assert ratio(np.array([4, 8]), np.array([1, 2])) == (4.0, 4.0)
    assert ratio(np.array([4]), np.array([1])) == (0.0, np.inf)
    for wrong in (([], []), ([1, 2], [1]), ([1], [0])):
        with pytest.raises(ValueError, match="need two vectors"):
            ratio(*map(np.asarray, wrong))
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        calls = rng.integers(5, 30, 100)
        low, high = ratio(rng.poisson(5 * calls), calls)
        covered += low <= 5 <= high
    assert 0.92 * 400 <= covered <= 0.98 * 400


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
