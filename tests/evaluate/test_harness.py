"""Likelihoods and bounds of spans, requests "generate until", and the model as lm-eval sees it."""

import dataclasses
import importlib
import json
import math
import sys
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from recital import CONFIG, Recital, recite, stand_in_for_lm_eval
from stubs import StubDenoiser, StubNetwork, tiny_network, tiny_params

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.config import TokenSpec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import likelihood
from paradec_jax.evaluate.bound import bounds, is_greedy, score_spans
from paradec_jax.evaluate.likelihood import Span, continuation_span, log_likelihoods, rolling_spans
from paradec_jax.evaluate.until import Until, fitting, generate_until, parse
from paradec_jax.generate import mark_of
from paradec_jax.store import Model

SPEC = token_spec()
GREEDY = pd.AutoRegressive(greedy=True)
SETTING = Setting("autoregressive", GREEDY)
LONG = {"max_gen_toks": 30}
STUB = StubDenoiser(max_length=32)
MASKED = TokenSpec(mask=STUB.mask, alignment="own", stop=(9,))
LIMITED = (LONG, LONG | {"until": [" and"]}, {"max_gen_toks": 2}, LONG)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def last(ids, count):
    """A row whose last ids are scored."""
    return Span(tuple(ids), len(ids) - count)


def totals(network, params, rows, **options):
    """Log-likelihood of each row, and whether each of its scored ids is the most probable one."""
    found = log_likelihoods(network, params, rows, **options)
    return [(float(scores.sum(dtype=np.float64)), bool(best.all())) for scores, best in found]


def model_of(tokenizer, network, spec=SPEC):
    model = Model(CONFIG, {}, spec, tokenizer)
    model.__dict__["network"] = network
    return model


@pytest.fixture(scope="module")
def denoiser():
    return model_of(character_tokenizer(" abcdefghi"), STUB, MASKED)


@pytest.fixture(scope="module")
def causal(tokenizer):
    start = 1 + len(tokenizer.encode("Ana has"))
    return model_of(tokenizer, recite(tokenizer, " 3 apples", start, end=False))


class TestLikelihoods:
    def test_known_answers(self):
        network = StubNetwork()
        prompt = [3, 1, 4]
        right = network.expected(prompt, 4)
        wrong = [*right[:3], (right[3] + 1) % 11]
        rows = [
            last((*prompt, *right), 4),
            last((*prompt, *wrong), 4),
            last((*prompt, *right), 2),
            last((1, 2), 0),
        ]
        total = math.log(math.exp(network.sharpness) + network.vocab_size - 1)
        best, other = network.sharpness - total, -total
        scores = totals(network, {}, rows, batch=3)
        assert [greedy for _, greedy in scores] == [True, False, True, True]
        expected = [4 * best, 3 * best + other, 2 * best, 0.0]
        np.testing.assert_allclose([score for score, _ in scores], expected, rtol=1e-4)

    @pytest.mark.slow
    def test_agree_with_what_static_decoding_says_of_its_own_tokens(self):
        network, params = tiny_network("full", recurrence=2), tiny_params()
        prompts = [[3, 1, 4], [5, 9]]
        # One key for all rows: the initial states are then those of the likelihoods.
        keys = jax.random.wrap_key_data(np.stack([jax.random.key_data(jax.random.key(7))] * 2))
        request = pd.make_request(prompts, max_new_tokens=5, keys=keys)
        decoded = pd.run(pd.Static(network, 10, log_probs=True), params, request)
        rows = [last((*p, *new), 5) for p, new in zip(prompts, decoded.completions(), strict=True)]
        scores = totals(network, params, rows, batch=2, seed=7)
        own = np.asarray(decoded.log_probs).sum(axis=1)
        np.testing.assert_allclose([score for score, _ in scores], own, rtol=2e-5)
        assert all(greedy for _, greedy in scores)
        # The other row does not matter, and another token is not the greedy one.
        changed = last((*rows[0].ids[:-1], (rows[0].ids[-1] + 1) % 32), 5)
        again = totals(network, params, [changed, rows[1]], batch=2, seed=7)
        assert again[1] == scores[1] and not again[0][1] and again[0][0] < scores[0][0]

    def test_lengths_share_programs(self):
        network = StubNetwork(vocab_size=13)
        before = likelihood._score._cache_size()
        log_likelihoods(network, {}, [last((1,) * n, 1) for n in range(2, 66, 3)], batch=4)
        assert likelihood._score._cache_size() == before + 2  # 32 and 64 positions

    def test_rows_that_do_not_fit(self):
        for row in (last((1,) * 66, 1), last((1, 2), 2), last((1, 2), -1)):
            with pytest.raises(ValueError, match="does not fit"):
                log_likelihoods(StubNetwork(), {}, [row])


class TestRows:
    def test_context_and_continuation(self, tokenizer):
        row = continuation_span(tokenizer, SPEC, "Ana has", " 3 apples", 256)
        read, scored = tokenizer.encode("Ana has"), tokenizer.encode(" 3 apples")
        assert row == last((SPEC.bos, *read, *scored), len(scored))
        # White space at the end of the context is the continuation's.
        assert continuation_span(tokenizer, SPEC, "Ana has ", "3 apples", 256) == row

    def test_without_a_context_or_a_bos(self, tokenizer):
        scored = tokenizer.encode("Ana")
        assert continuation_span(tokenizer, SPEC, "", "Ana", 256) == last(
            (SPEC.bos, *scored), len(scored)
        )
        bare = TokenSpec(stop=(2,))
        assert continuation_span(tokenizer, bare, "", "Ana", 256) == last((2, *scored), len(scored))
        assert continuation_span(tokenizer, bare, "Ana", " has", 256).ids[0] == scored[0]
        assert continuation_span(tokenizer, SPEC, "Ana", "", 256).count == 0
        with pytest.raises(ValueError, match="neither a begin-of-text nor a stop token"):
            continuation_span(tokenizer, TokenSpec(), "", "Ana", 256)

    def test_cut_on_the_left(self, tokenizer):
        whole = continuation_span(tokenizer, SPEC, "Ana has 3", " apples", 256)
        row = continuation_span(tokenizer, SPEC, "Ana has 3", " apples", 3)
        assert row == last(whole.ids[-4:], whole.count)
        with pytest.raises(
            ValueError, match="a continuation has 4 tokens, more than the 3 positions"
        ):
            continuation_span(tokenizer, SPEC, "Ana", "1234", 3)

    @pytest.mark.parametrize("count", [0, 1, 4, 5, 10, 12])
    def test_rolling_scores_every_token_once(self, tokenizer, count):
        text = "1" * count
        rows = rolling_spans(tokenizer, SPEC, text, 4)
        scored = [token for row in rows for token in row.ids[row.start :]]
        assert scored == tokenizer.encode(text) and len(scored) == count
        assert all(row.count < len(row.ids) <= 5 for row in rows)
        if count > 4:
            assert len(rows[-1].ids) == 5  # as much context as there is room for


class TestSpans:
    def test_a_denoiser_is_bounded_and_fills(self, denoiser):
        canvas = [3, 1, None, None, 4, None]
        filled = STUB.expected(canvas)
        right = Span(tuple(filled), 2, 4)
        wrong = Span((*filled[:2], 8, *filled[3:]), 2, 4)
        nothing = Span((1, 2, 3), 3)
        scored = score_spans(denoiser, [right, nothing, wrong], draws=4, seed=3, batch=3)
        streams, mask = [0, 2], STUB.mask
        wanted = bounds(STUB, {}, [right, wrong], mask, draws=4, seed=3, batch=3, streams=streams)
        assert [(of.nats, of.error) for of in scored[::2]] == [(of.nats, of.error) for of in wanted]
        assert [of.greedy for of in scored] == [True, True, False] and scored[1].nats == 0
        assert scored[0].nats < scored[2].nats
        assert is_greedy(denoiser, [right, wrong], batch=1) == [True, False]

    def test_a_row_does_not_see_its_padding(self, denoiser):
        """The stub goes astray where a query sees too much or too little."""
        rows = [Span(tuple(STUB.expected([4, None, None] + [None] * n)), 1) for n in (0, 9, 27)]
        assert [of.greedy for of in score_spans(denoiser, rows, draws=2)] == [True] * 3

    def test_exact_is_exact(self, causal):
        tokenizer, spec = causal.tokenizer, causal.token_spec
        alone = continuation_span(tokenizer, spec, "Ana has", " 3 apples", 256)
        span = Span((*alone.ids, 7), alone.start, alone.stop)  # one more token, which is not scored
        (found,) = score_spans(causal, [span])
        assert found.nats == pytest.approx(0, abs=1e-4) and found.error == 0 and found.greedy

    def test_refusals(self, denoiser):
        reason = "a likelihood needs a model that predicts the next token"
        with pytest.raises(ValueError, match=reason):
            score_spans(model_of(None, STUB, TokenSpec(alignment="own")), [Span((1, 2), 1)])


class TestUntil:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({}, Until((), 256, (("temperature", 0.0),))),
            ({"until": "Q:"}, Until(("Q:",), 256, (("temperature", 0.0),))),
            (
                {"until": ["a", "", "b"], "max_gen_toks": 9},
                Until(("a", "b"), 9, (("temperature", 0.0),)),
            ),
            (
                {"temperature": 0.2, "top_p": 0.9},
                Until((), 256, (("temperature", 0.2), ("top_p", 0.9))),
            ),
            ({"do_sample": True, "temperature": 1.0}, Until((), 256, (("temperature", 1.0),))),
            ({"do_sample": False, "temperature": 1.0}, Until((), 256, (("temperature", 0.0),))),
            (
                {"until": None, "top_k": 3, "temperature": 0},
                Until((), 256, (("temperature", 0.0),)),
            ),
        ],
    )
    def test_arguments(self, arguments, expected):
        assert parse(arguments) == expected

    def test_arguments_that_are_refused(self):
        with pytest.raises(ValueError, match="num_beams is no generation argument here"):
            parse({"num_beams": 4})
        with pytest.raises(ValueError, match="do_sample is true, so temperature must be above 0"):
            parse({"do_sample": True})

    def test_each_request_has_its_own_stop_and_budget(self, tokenizer):
        start = 1 + len(tokenizer.encode("Ana"))
        model = model_of(tokenizer, recite(tokenizer, "10 apples and 2 pears", start))
        requests = [("Ana", parse(x)) for x in LIMITED]
        whole = "10 apples and 2 pears"
        texts = generate_until(model, requests, SETTING, rows=2)
        assert texts == [whole, "10 apples", "10", whole]

    def test_batches_of_one_shape_do_not_change_a_text(self, tokenizer):
        model = model_of(tokenizer, StubNetwork(vocab_size=384, max_length=256))
        contexts = ("Ana has 3 apples.", "Ben", "Cal and Dan have 2 pears.")
        requests = [(context, parse({"max_gen_toks": 5, "until": "e"})) for context in contexts]
        two, four = (generate_until(model, requests, SETTING, rows=rows) for rows in (2, 4))
        assert two == four and len(set(two)) == 3

    def test_temperature_and_equal_requests(self, tokenizer):
        model = model_of(tokenizer, Recital((5,), flat=True))
        arguments = {"temperature": 1.0, "max_gen_toks": 8}
        requests = [("Ana", parse(arguments))] * 2 + [("Ana", parse({"max_gen_toks": 8}))]
        first, second, greedy = generate_until(model, requests, SETTING)
        assert len({first, second, greedy}) == 3 and len(set(greedy)) == 1
        assert generate_until(model, requests[:1], SETTING) == [first]

    def test_contexts_are_cut_on_the_left(self, tokenizer):
        model = model_of(tokenizer, Recital((5,), max_length=12))
        context = "Ana has 3 apples. Ben has 4 more."
        kept = fitting(model, context, 6)
        assert context.endswith(kept) and len(tokenizer.encode(kept)) == 5
        assert fitting(model, context, 200) == context and fitting(model, "", 1) == ""
        snow = "\N{SNOWMAN}" * 3  # three bytes each, and as many tokens
        assert [fitting(model, snow, room) for room in (9, 7, 4, 3)] == [
            snow[1:],
            snow[1:],
            snow[2:],
            "",
        ]
        with pytest.raises(ValueError, match="max_gen_toks is 12, but the model was built for 12"):
            generate_until(model, [(context, parse({"max_gen_toks": 12}))], SETTING)


def request(*args):
    return SimpleNamespace(args=args)


class TestDecoderLM:
    @pytest.fixture
    def harness(self, monkeypatch):
        yield stand_in_for_lm_eval(monkeypatch)
        sys.modules.pop("paradec_jax.evaluate.harness", None)

    def test_three_methods(self, harness, tokenizer):
        context, script = "Ana has", " 3 apples"
        start = 1 + len(tokenizer.encode(context))
        lm = harness.DecoderLM(
            model_of(tokenizer, recite(tokenizer, script, start)), GREEDY, rows=2
        )
        right, wrong = lm.loglikelihood([request(context, script), request(context, " 4 apples")])
        assert right[1] and not wrong[1]
        assert right[0] == pytest.approx(0.0, abs=1e-4) and wrong[0] == pytest.approx(
            -50.0, abs=1e-3
        )
        # The network recites from the place of the script on; what it says before is its first
        # token.
        assert lm.loglikelihood_rolling([request(""), request(context + script)])[0] == 0.0
        assert lm.generate_until([request(context, {"until": ["app"], "max_gen_toks": 9})]) == [
            " 3 "
        ]
        assert lm.tokenizer_name == ""

    def test_a_denoiser_answers_with_bounds_and_says_so(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds, each the mean of 4 draws"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=4)
        assert lm.likelihood == "bound"
        pairs = [("ab h", " bd"), ("ab h", " ba"), ("cf", "h")]
        found = lm.loglikelihood([request(*pair) for pair in pairs])
        assert [greedy for _, greedy in found] == [True, False, True]
        spans = [continuation_span(denoiser.tokenizer, MASKED, *pair, 31) for pair in pairs]
        marks = [mark_of(context.encode()) >> 1 for context, _ in pairs]
        assert marks[0] == marks[1] != marks[2]
        wanted = bounds(STUB, {}, spans, STUB.mask, draws=4, streams=marks)
        assert [score for score, _ in found] == [-of.nats for of in wanted]

    def test_full_attention_in_an_order(self, harness):
        """About the next token, by a decoder of its own, without a warning."""
        network = StubDenoiser(max_length=32, alignment="next")
        spec = dataclasses.replace(MASKED, alignment="next")
        model = model_of(character_tokenizer(" abcdefghi"), network, spec)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lm = harness.DecoderLM(model, pd.SemiAutoregressive(), order="forward")
        assert lm.likelihood == "exact"
        right, wrong = lm.loglikelihood([request("ab h", " bd"), request("ab h", " ba")])
        assert right[1] and not wrong[1] and 0 > right[0] > wrong[0]
        assert lm.generate_until([request("ab h", {"max_gen_toks": 3})]) == [" bd"]

    def test_whole_texts(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=2)
        text = "abcdefgh" * 5
        (found,) = lm.loglikelihood_rolling([request(text)])
        spans = rolling_spans(denoiser.tokenizer, MASKED, text, 31)
        assert len(spans) == 2 and max(len(span.ids) for span in spans) == 32
        assert found == pytest.approx(
            -sum(of.nats for of in bounds(STUB, {}, spans, STUB.mask, draws=2))
        )

    def test_exact_models_have_no_draws(self, harness, causal):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert harness.DecoderLM(causal, pd.AutoRegressive()).likelihood == "exact"
        with pytest.raises(ValueError, match="likelihoods are exact, so draws and order must"):
            harness.DecoderLM(causal, pd.AutoRegressive(), draws=4)
        with pytest.raises(ValueError, match="no tokenizer"):
            harness.DecoderLM(model_of(None, Recital((5,))), GREEDY)

    def test_without_lm_eval(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        monkeypatch.delitem(sys.modules, "paradec_jax.evaluate.harness", raising=False)
        with pytest.raises(ImportError, match=r"install paradec-jax\[eval\]"):
            importlib.import_module("paradec_jax.evaluate.harness")


@pytest.mark.peers
def test_lm_eval_runs_own_items_offline(tmp_path, monkeypatch):
    """The real package, on a few word problems and the bundled model, against a computation row by
    row.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    lm_eval = pytest.importorskip("lm_eval")
    from experiments.tasks import word_problems
    from paradec_jax.evaluate.harness import DecoderLM

    problems = word_problems(3, seed=5, steps=(2, 2))
    path = tmp_path / "items.jsonl"
    rows = [{"prompt": x.prompt, "solution": x.solution, "answer": str(x.answer)} for x in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    found = {"function": "regex", "regex_pattern": "#### (\\d+)"}
    tasks = [
        common
        | {
            "task": "own_generate",
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Question"], "max_gen_toks": 100, "do_sample": False},
            "filter_list": [{"name": "last", "filter": [found, {"function": "take_first"}]}],
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
        common
        | {
            "task": "own_likelihood",
            "output_type": "loglikelihood",
            "doc_to_target": "{{solution}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ]
    model = pd.load("tiny-recurrent")
    out = lm_eval.simple_evaluate(
        model=DecoderLM(model, GREEDY, rows=3), tasks=tasks, log_samples=True, bootstrap_iters=0
    )
    assert out["results"]["own_generate"]["exact_match,last"] == 1.0
    for sample in out["samples"]["own_likelihood"]:
        problem = problems[sample["doc_id"]]
        row = continuation_span(
            model.tokenizer, model.token_spec, problem.prompt, problem.solution, 512
        )
        alone = totals(model.network, model.params, [row], batch=1)[0]
        assert float(sample["resps"][0][0][0]) == pytest.approx(alone[0], rel=1e-4)
