"""Answers, statistics and the rows of the table; settings, and what changes them."""

import dataclasses
import json

import numpy as np
import pytest
from small_tokenizers import BOS, llama
from stub_table import CONFIG, KEYS, STUB, small_settings, strict

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec, word_problems
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Prompts, Source
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import FAMILIES
from paradec_jax.store import Model

PROBLEMS = word_problems(5, seed=0, steps=(2, 2))


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "network", STUB)
        yield Model(CONFIG, {}, token_spec(), build_tokenizer())


def sources_of(model, settings):
    return [Source("tiny", model, setting) for setting in settings]


@pytest.fixture(scope="module")
def result(model):
    stages = {}

    def report(stage, units):
        stages[stage] = units
        return lambda done: stages.__setitem__(stage, stages[stage] - done)

    sources = sources_of(model, small_settings())
    found = compare(sources, PROBLEMS, timed=2, passes=1, rows=3, report=report)
    assert len(stages) == 2 and not any(stages.values())
    return found


@pytest.mark.slow
def test_compare_rows(result):
    assert [row["decoder"] for row in result.rows] == ["autoregressive"] * 2 + ["wavefront"]
    assert [row["label"] for row in result.rows[:2]] == ["r 2", "r 4"]
    assert result.exact.shape == result.calls.shape == (3, 5)
    few, base, wave = result.rows
    for row in result.rows:
        assert set(KEYS.split()) <= row.keys()
        told = [row[name] for name in ("family", "model", "batch", "problems")]
        assert told == ["recurrent_depth", "tiny", 1, 5]
        assert isinstance(row["exact"], int) and len(row["interval"]) == 2
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["baseline_tokens_per_second"] == base["tokens_per_second"]
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["baseline_tokens_per_second"]
        )
        # of a single pass
        assert row["quickest_seconds"] == row["seconds"] == row["slowest_seconds"]
        assert [sum(seconds) for seconds in row["each"]] == row["passes"]
        assert sum(row["generated"]) == row["tokens"]
        low, high = row["speedup_interval"]
        assert 0 < low <= high and len(row["decode_speedup_interval"]) == 2
    strict(json.dumps(result.rows, allow_nan=False))
    assert wave["settings"]["exit_threshold"] is None  # infinite
    assert (
        base["speedup"] == 1.0
        and base["equals_greedy"] == 1.0
        and base["speedup_interval"] == [1.0, 1.0]
    )
    # a stub has no parameters
    assert result.facts["dtypes"] == [] and result.facts["device"]["threads"] >= 1
    assert few["equals_greedy"] < 1.0
    # A wave of one position that commits in every step is static decoding.
    assert wave["equals_greedy"] == 1.0
    assert wave["network_calls_per_token"] == base["network_calls_per_token"] == 1.0
    assert (few["recurrences_per_token"], base["recurrences_per_token"]) == (2.0, 4.0)
    assert wave["settings"]["window"] == 1 and base["settings"]["recurrence"] == 4


def test_answers_do_not_depend_on_the_batch(model, result):
    alone = compare(sources_of(model, small_settings()[1:2]), PROBLEMS, timed=0, rows=5)
    for key in ("exact", "tokens_per_network_call", "recurrences_per_token"):
        assert alone.rows[0][key] == result.rows[1][key]
    assert alone.texts[0] == result.texts[1] and "seconds" not in alone.rows[0]


def test_refusals(model, monkeypatch):
    sources = sources_of(model, small_settings())
    with pytest.raises(ValueError, match="exactly one baseline"):
        compare(sources[:1], PROBLEMS)
    with pytest.raises(ValueError, match="at least one prompt"):
        compare(sources, [])
    with pytest.raises(ValueError, match="need a budget"):
        compare(sources, ["Ana"])
    with pytest.raises(ValueError, match="no tokenizer"):
        compare(sources_of(dataclasses.replace(model, tokenizer=None), small_settings()), PROBLEMS)
    monkeypatch.setattr(Model, "network", dataclasses.replace(STUB, max_length=64))
    with pytest.raises(ValueError, match="more than the 64"):
        compare(sources, PROBLEMS)


def test_answers_are_parts_of_their_texts():
    tokenizer = llama()
    rows = [tokenizer.begun(tokenizer.encode(text), BOS) for text in ("a\n", "a b")]
    tokens = np.asarray([row + [0] * (8 - len(row)) for row in rows])
    prompts = Prompts(tokens, np.asarray([len(row) for row in rows]), None, 8)
    assert prompts.texts(tokenizer, [tokenizer.encode_after("a", " b")] * 2) == [" b", " b"]


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_the_table(family):
    settings = TABLES[family]
    assert [of.name for of in settings if of.baseline] == [FAMILIES[family].baseline]
    assert {of.name: type(of.decoder) for of in settings} == {
        name: type(of) for name, of in FAMILIES[family].decoders.items()
    }
    rows = [json.dumps([setting.name, setting.settings()], allow_nan=False) for setting in settings]
    assert len(set(rows)) == len(rows)
    labels = [(setting.name, setting.label()) for setting in settings]
    assert len(set(labels)) == len(labels)


def test_each_decoder_takes_its_own_options():
    adaptive = Setting("adaptive", pd.Adaptive()).changed({"recurrence": 3, "top_p": 0.5})
    assert (adaptive.decoder.max_recurrence, adaptive.knobs.top_p, adaptive.decoder.greedy) == (
        3,
        0.5,
        True,
    )
    wave = Setting("wavefront", pd.Wavefront()).changed({"window": 9, "temperature": 0.2})
    assert (wave.decoder.window, wave.knobs.temperature, wave.decoder.greedy) == (9, 0.2, False)
    sampled = Setting("autoregressive", pd.Static(), pd.Static.Knobs(temperature=1.0))
    assert sampled.sampled and not sampled.changed({}).decoder.greedy
    with pytest.raises(ValueError, match="--inner-recurrence is no option of autoregressive"):
        sampled.changed({"inner_recurrence": 2})
