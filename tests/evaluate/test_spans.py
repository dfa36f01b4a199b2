"""Likelihoods of spans, exact and bounded, and lm-eval's questions to a denoiser."""

import sys
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from recital import CONFIG, recite, stand_in_for_lm_eval
from stubs import StubDenoiser

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.config import TokenSpec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.evaluate.bound import best_token, bounds, fill, score_spans
from paradec_jax.evaluate.likelihood import Span, continuation_span, rolling_spans
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
        assert best_token(jnp.asarray(logits), 3).tolist() == [0, 1, 0]

    def test_exact_is_exact(self, causal):
        tokenizer, spec = causal.tokenizer, causal.token_spec
        alone = continuation_span(tokenizer, spec, "Ana has", " 3 apples", 256)
        span = Span((*alone.ids, 7), alone.start, alone.stop)  # one more token, which is not scored
        (found,) = score_spans(causal, [span])
        assert found.nats == pytest.approx(0, abs=1e-4) and found.error == 0 and found.greedy

    def test_refusals(self, denoiser):
        with pytest.raises(ValueError, match="a span of 33 ids does not fit"):
            fill(denoiser, [Span((1,) * 33, 2)])
        for spec in (TokenSpec(alignment="own"), TokenSpec(mask=STUB.mask)):
            with pytest.raises(ValueError, match="a likelihood needs a model that predicts the next token"):
                score_spans(model_of(STUB, spec, None), [Span((1, 2), 1)])


class TestHarness:
    @pytest.fixture
    def harness(self, monkeypatch):
        yield stand_in_for_lm_eval(monkeypatch)
        sys.modules.pop("paradec_jax.evaluate.harness", None)

    def test_a_denoiser_answers_with_bounds_and_says_so(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds, each the mean of 4 draws"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=4)
        assert lm.likelihood == "bound"
        pairs = [("ab h", " bd"), ("ab h", " ba"), ("cf", "h")]
        found = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
        assert [greedy for _, greedy in found] == [True, False, True]
        spans = [continuation_span(denoiser.tokenizer, SPEC, *pair, 31) for pair in pairs]
        marks = [harness._mark(context) for context, _ in pairs]
        assert marks[0] == marks[1] != marks[2]
        wanted = bounds(STUB, {}, spans, STUB.mask, draws=4, streams=marks)
        assert [score for score, _ in found] == [-of.nats for of in wanted]

    def test_whole_texts(self, harness, denoiser):
        with pytest.warns(UserWarning, match="lower bounds"):
            lm = harness.DecoderLM(denoiser, pd.Masked(), draws=2)
        text = "abcdefgh" * 5
        (found,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        spans = rolling_spans(denoiser.tokenizer, SPEC, text, 31)
        assert len(spans) == 2 and max(len(span.ids) for span in spans) == 32
        assert found == pytest.approx(-sum(of.nats for of in bounds(STUB, {}, spans, STUB.mask, draws=2)))

    def test_exact_models_have_no_draws(self, harness, causal):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert harness.DecoderLM(causal, pd.AutoRegressive()).likelihood == "exact"
        with pytest.raises(ValueError, match="likelihoods are exact, so draws must be left out"):
            harness.DecoderLM(causal, pd.AutoRegressive(), draws=4)
