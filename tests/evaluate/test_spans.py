"""Likelihoods of spans, exact and bounded: last words, multiple choice, and lm-eval's questions to a denoiser."""

import dataclasses
import importlib
import json
import math
import sys
import warnings
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from recital import CONFIG, recite
from stubs import StubDenoiser

import paradec_jax as pd
from paradec_jax.config import TokenSpec
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.evaluate import spans as spans_module
from paradec_jax.evaluate.bound import Bound, Span, bounds
from paradec_jax.evaluate.choices import Question, choice_span, multiple_choice, read_questions
from paradec_jax.evaluate.lambada import lambada, passage_span, read_passages
from paradec_jax.evaluate.likelihood import continuation_row, rolling_rows
from paradec_jax.evaluate.spans import fill, score_spans
from paradec_jax.store import Model

STUB = StubDenoiser(max_length=32)
END = 9
SPEC = TokenSpec(mask=STUB.mask, alignment="own", stop=(END,))
ALPHABET = " abcdefghi"  # the token of each is its place


def model_of(network, spec, tokenizer):
    model = Model(CONFIG, {}, spec, tokenizer)
    model.__dict__["network"] = network
    return model


@pytest.fixture(scope="module")
def denoiser():
    return model_of(STUB, SPEC, character_tokenizer(ALPHABET))


@pytest.fixture(scope="module")
def causal():
    tokenizer = build_tokenizer()
    start = 1 + len(tokenizer.encode("Ana has"))
    return model_of(recite(tokenizer, " 3 apples", start, end=False), token_spec(), tokenizer)


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
        assert fill(denoiser, [right, wrong], batch=1) == [tuple(filled[2:4])] * 2

    def test_a_row_does_not_see_its_padding(self, denoiser):
        """The stub goes astray where a query sees too much or too little."""
        rows = [Span(tuple(STUB.expected([4, None, None] + [None] * n)), 1) for n in (0, 9, 27)]
        assert [of.greedy for of in score_spans(denoiser, rows, draws=2)] == [True] * 3

    def test_the_mask_is_no_token(self):
        logits = np.zeros((3, 4), np.float32)
        logits[:, 3], logits[1, 1] = 9, 1
        assert spans_module.best_token(jnp.asarray(logits), 3).tolist() == [0, 1, 0]

    def test_exact_is_exact(self, causal):
        tokenizer, spec = causal.tokenizer, causal.token_spec
        row = continuation_row(tokenizer, spec, "Ana has", " 3 apples", 256)
        span = Span((*row.ids, 7), len(row.ids) - row.count, len(row.ids))
        (found,) = score_spans(causal, [span])
        assert found.nats == pytest.approx(0, abs=1e-4) and found.error == 0 and found.greedy

    def test_refusals(self, denoiser):
        with pytest.raises(ValueError, match="a span of 33 ids does not fit"):
            fill(denoiser, [Span((1,) * 33, 2)])
        for spec in (TokenSpec(alignment="own"), TokenSpec(mask=STUB.mask)):
            with pytest.raises(ValueError, match="a likelihood needs a model that predicts the next token"):
                score_spans(model_of(STUB, spec, None), [Span((1, 2), 1)])


class TestLambada:
    def test_passages_of_a_file(self, tmp_path):
        path = tmp_path / "passages.jsonl"
        lines = [{"text": "the  cat sat on\n"}, {"text": "two words"}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert read_passages(path) == [("the  cat sat", " on"), ("two", " words")]
        path.write_text(json.dumps({"text": "word"}))
        with pytest.raises(ValueError, match="line 1: a passage needs at least two words"):
            read_passages(path)

    def test_a_denoiser_sees_both_ends(self, denoiser):
        assert passage_span(denoiser, "ab h", " bd") == Span((END, 1, 2, 0, 8, 0, 2, 4, END), 5, 8)
        # The stub counts on in twos from what stands before: 8, 0, 2, 4 is " bd" after "h".
        found = lambada(denoiser, [("ab h", " bd"), ("ab h", " ba"), ("h", " b"), ("gi", " b")], draws=4)
        assert (found.accuracy, found.likelihood, found.draws, found.cut) == (0.5, "bound", 4, 0)
        assert found.passages == 4 and found.accuracy_interval[0] < 0.5 < found.accuracy_interval[1]

    def test_perplexity_is_of_a_word(self, denoiser, monkeypatch):
        nats = iter([1.0, 3.0, 2.0])
        monkeypatch.setattr(spans_module, "bounds", lambda *a, **k: [Bound(next(nats), 0.1, 1) for _ in a[2]])
        found = lambada(denoiser, [("a", " b"), ("c", " bd"), ("e", " b")])
        assert found.perplexity == pytest.approx(math.exp(2))
        assert found.perplexity_interval[0] < math.exp(2) < found.perplexity_interval[1]

    def test_a_causal_model_is_exact(self, causal):
        found = lambada(causal, [("Ana has", " 3"), ("Ana has", " 4")])
        assert (found.accuracy, found.likelihood, found.draws) == (0.5, "exact", None)
        assert found.perplexity == pytest.approx(math.exp(25), rel=1e-3)

    def test_long_passages_lose_their_beginning(self, denoiser):
        context = "ab" * 20 + "h"
        found = lambada(denoiser, [(context, " bd")], draws=2)
        assert found.accuracy == 1 and found.cut == 1
        with pytest.raises(ValueError, match="a word has 33 tokens"):
            lambada(denoiser, [("a", " " + "b" * 32)])
        with pytest.raises(ValueError, match="at least one passage"):
            lambada(denoiser, [])


class TestChoices:
    QUESTIONS = (Question("ab h", (" bd", " ba", " dd"), 0), Question("cf", (" a", "h"), 0))

    def test_a_causal_model_picks_what_it_would_write(self, causal):
        question = Question("Ana has", (" 2 apples", " 3 apples", " 3 pears"), 1)
        found = multiple_choice(causal, [question, dataclasses.replace(question, answer=0)])
        assert found.picked == (1, 1) and found.accuracy == 0.5 and found.likelihood == "exact"
        assert [of.greedy for of in found.scored[0]] == [False, True, False]

    def test_a_denoiser_picks_the_smallest_bound(self, denoiser):
        found = multiple_choice(denoiser, self.QUESTIONS, draws=16)
        assert found.picked == (0, 1) and found.accuracy == 0.5
        assert (found.likelihood, found.draws) == ("bound", 16)

    def test_choices_of_a_question_share_their_draws(self, denoiser, monkeypatch):
        streams = []

        def keep(network, params, rows, mask, **options):
            streams.extend(options["streams"])
            return [Bound(float(row.count), 0.1, row.count) for row in rows]

        monkeypatch.setattr(spans_module, "bounds", keep)
        found = multiple_choice(denoiser, self.QUESTIONS)
        assert streams == [0, 0, 0, 1, 1]
        assert found.picked == (0, 1), "the fewest tokens"
        assert found.picked_by_character == (0, 0), "one nat a character each"

    def test_room_for_the_last_token(self, denoiser):
        span = choice_span(denoiser, "a" * 60, "bb")
        assert len(span.ids) == 32 and span.count == 2

    def test_questions_of_a_file(self, tmp_path):
        path = tmp_path / "questions.jsonl"
        line = {"context": "a", "choices": ["b", "c"], "answer": 1}
        path.write_text(json.dumps(line))
        assert read_questions(path) == [Question("a", ("b", "c"), 1)]
        for wrong in ({"answer": 2}, {"choices": ["b"]}, {"choices": ["b", ""]}):
            path.write_text(json.dumps(line | wrong))
            with pytest.raises(ValueError, match="line 1: a question needs two choices or more"):
                read_questions(path)

    def test_refusals(self, denoiser):
        with pytest.raises(ValueError, match="at least one question"):
            multiple_choice(denoiser, [])
        with pytest.raises(ValueError, match="not 2 and -1"):
            multiple_choice(denoiser, [Question("a", ("b", "c"), -1)])


class TestHarness:
    @pytest.fixture
    def harness(self, monkeypatch):
        """The adapter on a stand-in for lm-eval, whether or not that is installed."""
        module = ModuleType("lm_eval.api.model")
        module.LM = type("LM", (), {})
        for name in ("lm_eval", "lm_eval.api"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
        monkeypatch.delitem(sys.modules, "paradec_jax.evaluate.harness", raising=False)
        yield importlib.import_module("paradec_jax.evaluate.harness")
        sys.modules.pop("paradec_jax.evaluate.harness", None)

    def test_a_denoiser_answers_with_bounds_and_says_so(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds, each the mean of 4 draws"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=4)
        assert lm.likelihood == "bound"
        pairs = [("ab h", " bd"), ("ab h", " ba"), ("cf", "h")]
        found = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
        assert [greedy for _, greedy in found] == [True, False, True]
        rows = [continuation_row(denoiser.tokenizer, SPEC, *pair, 31) for pair in pairs]
        spans = [Span(row.ids, len(row.ids) - row.count) for row in rows]
        marks = [harness._mark(context) for context, _ in pairs]
        assert marks[0] == marks[1] != marks[2]
        wanted = bounds(STUB, {}, spans, STUB.mask, draws=4, streams=marks)
        assert [score for score, _ in found] == [-of.nats for of in wanted]

    def test_whole_texts(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=2)
        text = "abcdefgh" * 5
        (found,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        rows = rolling_rows(denoiser.tokenizer, SPEC, text, 31)
        spans = [Span(row.ids, len(row.ids) - row.count) for row in rows]
        assert len(spans) == 2 and max(len(span.ids) for span in spans) == 32
        assert found == pytest.approx(-sum(of.nats for of in bounds(STUB, {}, spans, STUB.mask, draws=2)))

    def test_exact_models_have_no_draws(self, harness, causal):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert harness.DecoderLM(causal, pd.AutoRegressive()).likelihood == "exact"
        with pytest.raises(ValueError, match="likelihoods are exact, so draws must be left out"):
            harness.DecoderLM(causal, pd.AutoRegressive(), draws=4)
