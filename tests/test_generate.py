"""From texts to texts: samples, stop strings, errors before anything is compiled."""

import dataclasses

import numpy as np
import pytest
from recital import CONFIG, Recital, recite
from stubs.tiny import ones

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.decode.machine import drive
from paradec_jax.generate import continuation_task
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Model:
    return Model(CONFIG, {}, token_spec(), tokenizer)


def generated(model, prompts, tokens, network=None, **options) -> pd.Generation:
    return pd.generate(model, prompts, pd.AutoRegressive(network), max_new_tokens=tokens, **options)


def test_text_tokens_and_counts(model, tokenizer):
    text = "Ben has 3 + 4 = 7 apples.\n#### 7"
    out = generated(model, [""], 64, network=recite(tokenizer, text), log_probs=True)
    count = len(tokenizer.encode(text)) + 1
    assert out.text == [text]
    assert out.tokens == [[*tokenizer.encode(text), 2]]
    assert out.reasons == [pd.Reason.STOP]
    assert out.network_calls.tolist() == [count]
    assert out.counts["recurrences"].tolist() == [3 * count]
    assert out.tokens_per_call.tolist() == [1.0]
    assert out.log_probs is not None
    np.testing.assert_allclose(out.log_probs[0], np.zeros(count), atol=1e-3)


def test_unequal_prompts_stop_at_their_own_budget(model, tokenizer):
    network = recite(tokenizer, "0 1 2 3 4 5 6 7 8 9", end=False)
    out = generated(model, ["", "0 1"], 3, network)
    assert out.text == ["0 1 2", " 2 3 4"]
    assert out.reasons == [pd.Reason.BUDGET] * 2
    assert out.log_probs is None


def test_samples_draw_apart_and_the_same_in_any_batch(model):
    network = Recital((), flat=True)
    hot = pd.AutoRegressive.Knobs(temperature=1.0)

    def ids(prompts, samples, seed=0):
        return generated(model, prompts, 8, network, samples=samples, seed=seed, knobs=hot)

    both = ids(["Ana", "Ben"], 3)
    assert len({tuple(row) for row in both.tokens}) == 6
    assert ids(["Ben"], 2).tokens == both.tokens[3:5]
    assert ids(["Ben", "Ana"], 3).tokens == both.tokens[3:] + both.tokens[:3]
    assert ids(["Ben"], 2, seed=1).tokens != both.tokens[3:5]


STORY = "Ana has 12 apples.\nBen has 7 apples.\n#### 19"


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["\n"], "Ana has 12 apples."),
        (["2 app"], "Ana has 1"),  # begins and ends inside tokens' texts
        (["es.\nB", "12 apples.\nBen"], "Ana has "),  # one token completes both
        (["####"], "Ana has 12 apples.\nBen has 7 apples.\n"),
        (["pears"], STORY),
        (["19"], STORY[:-2]),  # the last token before the end
    ],
)
def test_stop_strings_are_exact_however_often_one_looks(model, tokenizer, stops, kept):
    options = {"network": recite(tokenizer, STORY), "stop_strings": stops}
    results = [generated(model, [""], 60, every=k, **options) for k in (1, 3, 100)]
    for out in results:
        assert out.text == [kept]
        if kept != STORY:
            assert out.reasons == [pd.Reason.CALLER]
            assert any(stop in tokenizer.decode(out.tokens[0]) for stop in stops)
            assert not any(stop in tokenizer.decode(out.tokens[0][:-1]) for stop in stops)
        else:
            assert out.tokens[0] == [*tokenizer.encode(STORY), 2]
            assert out.reasons == [pd.Reason.STOP]
    assert results[0].network_calls[0] == len(results[0].tokens[0])


def test_stop_strings_leave_other_rows_alone(model, tokenizer):
    options = {"network": recite(tokenizer, STORY), "stop_strings": ["Ana"], "every": 2}
    out = generated(model, ["", "Ana"], 60, **options)
    assert out.text == ["", STORY.removeprefix("Ana")]
    assert out.reasons == [pd.Reason.CALLER, pd.Reason.STOP]


def test_equal_buckets_share_one_program(model, tokenizer):
    network, before = recite(tokenizer, STORY), drive.compiled_run._cache_size()
    for seed, prompt in enumerate(("Ana", "Ana has 12 apples", "", "Ben")):
        generated(model, [prompt], 20, network, seed=seed)
    assert drive.compiled_run._cache_size() == before + 1


def test_budgets_share_programs_and_change_no_token(model, tokenizer):
    network, before = recite(tokenizer, STORY), drive.compiled_run._cache_size()
    texts = [generated(model, ["Ana"], budget, network).tokens[0] for budget in range(4, 40, 4)]
    assert drive.compiled_run._cache_size() <= before + 2
    assert all(text == texts[-1][: 4 * i] for i, text in enumerate(texts[:4], 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts must hold at least one text"),
        ({"prompts": "Ana"}, "prompts must be a list"),
        ({"prompts": ["Ana has 3 apples. " * 60]}, "prompt 0 has .* more than the 256 positions"),
        ({"max_new_tokens": 256}, "max_new_tokens is 256"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"max_new_tokens": [8, 9]}, r"max_new_tokens must be a whole number, not \[8, 9\]"),
        ({"max_new_tokens": 2**40}, "max_new_tokens must be at most 2147483647, not 1099511627776"),
        ({"seed": 1.5}, "seed must be whole numbers of 64 bits, not 1.5"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"every": 0}, "every must be at least 1"),
        ({"stop_strings": ["x", ""]}, "stop_strings must be a list"),
        ({"stop_strings": [5]}, "stop_strings must be a list"),
        ({"prompts": [5]}, "prompts must hold texts"),
        ({"prompts": ["a", None]}, "prompts must hold texts"),
        ({"bucket": 10**9}, "bucket must be at most 256, not 1000000000"),
        ({"decoder": "jacobi"}, "decoder must be a decoder, such as .*, not 'jacobi'"),
        ({"decoder": pd.Jacobi}, "decoder must be a decoder, such as .*, not <class"),
    ],
)
def test_errors_come_before_compilation(model, arguments, message):
    usual = {"prompts": ["Ana"], "max_new_tokens": 4, "decoder": pd.AutoRegressive()}
    with pytest.raises(ValueError, match=message):
        pd.generate(model, **usual | arguments)


def test_a_model_is_laid_out_once_for_all_its_depths(tokenizer):
    model = Model(CONFIG, ones(CONFIG), token_spec(), tokenizer)

    def prepared(network=None):
        decoder = pd.Static(network, recurrence=2)
        return continuation_task(model, ["Ana"], decoder, max_new_tokens=4).params

    assert prepared() is prepared() is prepared(model.network.at(3)) is model.prepared
    other = dataclasses.replace(model.network, config=dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert prepared(other) is not model.prepared
    assert "prepared" not in vars(dataclasses.replace(model))


def test_a_model_without_tokenizer_says_so(model):
    with pytest.raises(ValueError, match="no tokenizer"):
        generated(dataclasses.replace(model, tokenizer=None), ["Ana"], 4)


def test_a_prompt_may_fill_the_model_to_its_last_position(model, tokenizer):
    text = "Ana" + " 1" * 238
    count = len(tokenizer.encode(text)) + 1
    network = dataclasses.replace(recite(tokenizer, STORY, start=count), max_length=count + 4)
    out = generated(model, [text], 4, network)
    assert out.tokens == [tokenizer.encode(STORY)[:4]]
