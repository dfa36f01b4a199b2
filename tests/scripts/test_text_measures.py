"""Entropies, distinct n-grams, self-BLEU, n-gram models and intervals against cases computed by
hand.
"""

import itertools
import math
import sys

import numpy as np
import pytest

from experiments.masked_diffusion.text_measures import (
    entropy,
    jackknife,
    ngrams,
    reverse_perplexity,
    self_bleu,
    variety,
)
from paradec_jax.evaluate.entropy import sample_entropy
from paradec_jax.evaluate.intervals import Z95, bootstrap

ROWS = [[0, 0, 1, 1], [0, 1], [2]]


class TestEntropies:
    def test_of_all_samples_together(self):
        shares = np.array([3, 3, 1]) / 7
        assert entropy(ROWS) == pytest.approx(-np.sum(shares * np.log(shares)))
        # 00, 01, 11 in the first row, 01 in the second, none in the third; none over the edge of a
        # row.
        shares = np.array([1, 2, 1]) / 4
        assert entropy(ROWS, 2) == pytest.approx(-np.sum(shares * np.log(shares)))
        assert entropy([[7, 7, 7]]) == 0 and math.copysign(1, entropy([[7, 7, 7]])) == 1

    def test_within_samples(self):
        assert sample_entropy([*ROWS, []]) == pytest.approx((math.log(2) + math.log(2) + 0) / 3)

    def test_distinct(self):
        found = variety([*ROWS, [3, 0, 1, 1, 4]])
        assert [found[f"distinct_{n}"] for n in (1, 2, 3, 4)] == [5 / 12, 5 / 8, 4 / 5, 1]

    def test_too_short(self):
        with pytest.raises(ValueError, match="no sample has 4 tokens"):
            variety([[1, 2, 3]])
        with pytest.raises(ValueError, match="no sample has a token"):
            sample_entropy([[]])
        with pytest.raises(ValueError, match="n must be at least 1"):
            entropy(ROWS, 0)


class TestIntervals:
    def test_a_bootstrap_holds_the_ratio(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(3, 1, 200), rng.uniform(1, 2, 200)
        low, high = bootstrap(a, b)
        assert low < a.sum() / b.sum() < high and bootstrap(a, b) == (low, high)
        mean, error = a.mean(), a.std(ddof=1) / math.sqrt(200)
        assert bootstrap(a) == pytest.approx(
            (mean - Z95 * error, mean + Z95 * error), abs=0.15 * error
        )
        assert bootstrap(2 * b, b) == pytest.approx((2, 2))

    def test_too_little_for_a_bootstrap(self):
        assert bootstrap([3.0]) == (-math.inf, math.inf)
        # some resample has nothing below
        assert bootstrap([1.0, 0.0], [1.0, 0.0]) == (
            -math.inf,
            math.inf,
        )
        for wrong in ([], [[1.0]]):
            with pytest.raises(ValueError, match="two vectors of one length"):
                bootstrap(wrong)
        with pytest.raises(ValueError, match="two vectors of one length"):
            bootstrap([1.0, 2.0], [1.0])

    def test_a_jackknife_of_a_mean_is_its_standard_error(self):
        x = np.random.default_rng(0).normal(size=20)
        error = x.std(ddof=1) / math.sqrt(20)
        wanted = (x.mean() - Z95 * error, x.mean() + Z95 * error)
        assert jackknife(lambda kept: float(x[kept].mean()), 20) == pytest.approx(wanted)
        assert jackknife(lambda kept: 1.0, 1) == (-math.inf, math.inf)
        with pytest.raises(ValueError, match="at least 2 groups"):
            jackknife(lambda kept: 1.0, 5, groups=1)


class TestSelfBleu:
    def test_by_hand(self):
        pytest.importorskip("sacrebleu")
        # 2 of 3 words, 1 of 2 pairs, no triple of 1, which smoothing counts as half of one; no text
        # has four words.
        by_hand = 100 * (2 / 3 * 1 / 2 * 1 / 2) ** (1 / 3)
        assert self_bleu(["the cat sat", "the cat ran"]) == pytest.approx(by_hand)
        assert self_bleu(["a man, a plan"] * 3) == pytest.approx(100)
        assert self_bleu(["one two", "three four"]) == pytest.approx(0)

    def test_refusals(self, monkeypatch):
        with pytest.raises(ValueError, match="at least two texts"):
            self_bleu(["alone"])
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
        with pytest.raises(ImportError, match=r"missing: install paradec-jax\[eval\]"):
            self_bleu(["a", "b"])


class TestNgrams:
    def test_by_hand(self):
        model = ngrams([[0, 1, 0, 1]], 2, order=2)
        assert model.probability(0, []) == pytest.approx((2 + 2 / 2) / (4 + 2))
        assert model.probability(1, [0]) == pytest.approx((2 + 1 * 0.5) / (2 + 1))
        assert model.probability(0, [1]) == pytest.approx((1 + 1 * 0.5) / (1 + 1))
        # older tokens do not count
        assert model.probability(0, [0, 1]) == model.probability(0, [1])
        logs = [math.log(0.5), math.log(2.5 / 3), math.log(0.75), math.log(0.5)]
        assert model.perplexity([[0, 1, 0], [1]]) == pytest.approx(math.exp(-sum(logs) / 4))

    def test_every_history_has_a_law(self):
        rng = np.random.default_rng(0)
        model = ngrams(rng.integers(0, 3, (4, 12)).tolist(), 5, order=3)
        for history in [[], *map(list, itertools.product(range(5), repeat=2))]:
            law = [model.probability(token, history) for token in range(5)]
            assert sum(law) == pytest.approx(1) and min(law) > 0
        unseen, seen = model.probability(1, [4, 4]), model.probability(1, [])
        assert unseen == seen

    def test_samples_that_miss_a_part_of_the_language_are_found_out(self):
        rng = np.random.default_rng(0)
        real, whole = (rng.integers(0, 4, (50, 20)).tolist() for _ in range(2))
        part = [[token % 2 for token in row] for row in whole]
        assert 3.5 < reverse_perplexity(whole, real, 4, order=2) < 4.5
        assert reverse_perplexity(part, real, 4, order=2) > 20

    def test_refusals(self):
        with pytest.raises(ValueError, match="token 5 lies outside a vocabulary of 5"):
            ngrams([[1, 5]], 5)
        with pytest.raises(ValueError, match="no token"):
            reverse_perplexity([[1]], [[]], 5)
