"""Generative perplexity by both definitions under a judge with known answers, and what a judge
refuses.
"""

import math

import numpy as np
import pytest
from recital import CONFIG
from stubs import StubCausal, StubDenoiser

from experiments.masked_diffusion.judge import judge_ids, judge_texts, summed
from paradec_jax.config import TokenSpec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.evaluate.judge import judge_answers
from paradec_jax.store import Model

JUDGE = StubCausal(max_length=16)
LETTERS = "abcdefghij"  # and the mask: 11 tokens
END = 5


def model_of(network=JUDGE, spec=None, tokenizer=None):
    model = Model(CONFIG, {}, TokenSpec(stop=(END,)) if spec is None else spec, tokenizer)
    model.__dict__["network"] = network
    return model


def losses_of(row, before=()):
    """Nats of each token that has another one before it."""
    whole, total = [*before, *row], math.log(math.exp(JUDGE.sharpness) + JUDGE.vocab_size - 1)
    right = [
        JUDGE.expected(whole[:i], 1) == [whole[i]] for i in range(max(1, len(before)), len(whole))
    ]
    return [total - JUDGE.sharpness * hit for hit in right]


def samples():
    """The judge's own text, one that departs from it in two places, one with three ends of text,
    one of one token.
    """
    own = [3, *JUDGE.expected([3], 7)]
    other = [*own[:3], (own[3] + 1) % 11, 2]
    return [own, other, [END, 1, END, 4, END, END], [7]]


class TestIds:
    def test_begin_of_text(self):
        spec, rows = TokenSpec(bos=9, stop=(END,)), samples()
        found = judge_ids(model_of(spec=spec), rows, begin=True)
        means = [np.mean(losses_of(row, [9])) for row in rows]
        assert found.perplexity == pytest.approx(math.exp(np.mean(means)), rel=1e-5)
        assert found.counted.tolist() == [len(row) for row in rows]
        full = [[1] * JUDGE.max_length]
        assert judge_ids(model_of(spec=spec), full, begin=True).counted.tolist() == [
            JUDGE.max_length
        ]

    def test_an_empty_sample_has_no_say(self):
        rows = samples()[:3]
        assert (
            judge_ids(model_of(), [*rows, []]).perplexity == judge_ids(model_of(), rows).perplexity
        )
        above, below, counted = summed([np.zeros(0, np.float32)], [[]], "sdtt", (END,))
        assert above.tolist() == below.tolist() == [0.0] and counted.tolist() == [0]


class TestTexts:
    def test_another_vocabulary(self):
        """Ids of the judge's own tokenizer, after its begin-of-text where it has one, cut at its
        length.
        """
        tokenizer = character_tokenizer(LETTERS)
        texts = ["abcde", "jjihg", "a" * 40]
        for bos, room in ((None, 16), (10, 15)):
            judge = model_of(spec=TokenSpec(bos=bos, stop=(END,)), tokenizer=tokenizer)
            rows = [tokenizer.encode(text)[:room] for text in texts]
            found = judge_texts(judge, texts, definition="sdtt")
            same = judge_ids(judge, rows, definition="sdtt", begin=bos is not None)
            assert (found.perplexity, found.variety, found.cut) == (
                same.perplexity,
                same.variety,
                1,
            )
        assert judge_texts(judge, texts[:2]).definition == "mdlm"

    def test_answers_after_prompts(self):
        """Each token of an answer has its probability after all before it, by ids or, elsewhere, by
        texts.
        """
        prompt, letters, more = (
            [3, 5],
            character_tokenizer(LETTERS),
            character_tokenizer("-" + LETTERS),
        )
        rows = [[*JUDGE.expected(prompt, 1), 2], [4, 1, 1]]
        want = [[-sum(losses_of(row, before=prompt)), len(row)] for row in rows]
        judge = model_of(tokenizer=letters)
        np.testing.assert_allclose(
            judge_answers(judge, letters, [prompt] * 2, rows), want, rtol=1e-4
        )
        rows[0], want[0] = [4], [-losses_of([4], before=prompt)[0], 1]
        ids = [[i + 1 for i in row] for row in (prompt, *rows)]
        np.testing.assert_allclose(
            judge_answers(judge, more, ids[:1] * 2, ids[1:]), want, rtol=1e-4
        )

    def test_no_tokenizer(self):
        with pytest.raises(ValueError, match="no tokenizer"):
            judge_texts(model_of(), ["a"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("network", "spec"),
        [
            (StubDenoiser(), TokenSpec(mask=10, alignment="own")),
            (StubDenoiser(alignment="next"), TokenSpec(mask=10)),
            (JUDGE, TokenSpec(alignment="own")),
        ],
    )
    def test_models_that_cannot_judge(self, network, spec):
        with pytest.raises(
            ValueError, match="a judge must be a model that predicts the next token"
        ):
            judge_ids(model_of(network, spec), samples())

    def test_what_does_not_fit(self):
        judge = model_of()
        with pytest.raises(ValueError, match="definition must be one of sdtt, mdlm, not 'mean'"):
            judge_ids(judge, samples(), definition="mean")
        with pytest.raises(ValueError, match=r"sample 1 holds the id 11, .* a mask that was left"):
            judge_ids(judge, [[1, 2], [3, 11]])
        with pytest.raises(ValueError, match="sample 0 has 17 tokens"):
            judge_ids(judge, [[1] * 17])
        with pytest.raises(ValueError, match="no begin-of-text"):
            judge_ids(judge, samples(), begin=True)
        with pytest.raises(ValueError, match="no sample has a token to be judged"):
            judge_ids(judge, [[1], [2]])
