"""The language of two followers: its law against enumeration, draws, and what is lawful."""

import itertools

import numpy as np
import pytest
from chi_square import excess

from experiments.tasks.chains import Followers

LAW = Followers(symbols=4, length=4, share=0.7, seed=3)
TEXTS = np.asarray(list(itertools.product(range(4), repeat=4)))


def test_each_symbol_has_two_followers_and_all_are_equally_frequent():
    for symbols, seed in itertools.product((2, 3, 5, 16), range(4)):
        law = Followers(symbols=symbols, seed=seed)
        assert (np.count_nonzero(law.transitions, axis=1) == 2).all()
        np.testing.assert_allclose(law.transitions.sum(axis=1), 1)
        np.testing.assert_allclose(law.stationary, 1 / symbols, rtol=1e-9)
        np.testing.assert_array_equal(law.transitions[np.arange(symbols), law.followers[:, 0]], 0.5)
    np.testing.assert_allclose(np.sort(LAW.transitions)[:, 2:], [[0.3, 0.7]] * 4)
    assert (Followers(seed=1).followers != Followers().followers).any()
    # Not periodic: after enough symbols every one of them can stand there.
    assert (np.linalg.matrix_power(LAW.transitions, 64) > 0.2).all()


def test_probabilities_are_exact():
    found = np.exp(LAW.log_probability(TEXTS))
    assert found.sum() == pytest.approx(1, abs=1e-12)
    lawful = LAW.lawful(TEXTS)
    np.testing.assert_array_equal(found > 0, lawful.all(axis=1))
    assert np.count_nonzero(found) == 4 * 2**3
    possible = found[found > 0]
    assert LAW.floor == pytest.approx(-(possible * np.log(possible)).sum(), abs=1e-12)
    assert Followers().rate == pytest.approx(np.log(2))
    after = np.exp(LAW.log_conditional(TEXTS[:, 1:], TEXTS[:, 0]))
    np.testing.assert_allclose(after / 4, found, atol=1e-15)


def test_what_is_lawful():
    (first, second), law = LAW.followers[0], LAW
    neither = next(symbol for symbol in range(4) if symbol not in (first, second))
    rows = np.asarray([[0, first], [0, second], [0, neither], [neither, 4], [4, first]])
    np.testing.assert_array_equal(law.lawful(rows)[:, 1], [True, True, False, False, False])
    np.testing.assert_array_equal(law.lawful(rows)[:, 0], [True, True, True, True, False])
    before = np.full(5, 0)
    stays = bool(law.transitions[0, 0] > 0)
    np.testing.assert_array_equal(law.lawful(rows, before)[:3, 0], [stays] * 3)


def test_draws_have_the_law():
    texts = LAW.draw(40_000, 0)
    assert LAW.lawful(texts).all() and texts.dtype == np.int32
    assert abs(excess(texts, np.exp(LAW.log_probability(TEXTS)), 4)) < 4
    walked = LAW.walk(640_000, 1)
    assert LAW.lawful(walked[None]).all()
    # Windows far enough apart: what lies between them has forgotten the one before.
    far = walked.reshape(-1, 4)[::16]
    assert abs(excess(far, np.exp(LAW.log_probability(TEXTS)), 4)) < 4
    np.testing.assert_array_equal(LAW.draw(3, [5, 6]), LAW.draw(3, [5, 6]))
    assert LAW.digest != Followers(symbols=4, length=4, share=0.7, seed=4).digest
