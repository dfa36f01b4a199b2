"""Wilson's interval and McNemar's test against their formulas, at their limits too."""

import math

import numpy as np
import pytest

from experiments.common.ratios import quicker, times
from paradec_jax.evaluate.intervals import Z95, ends, paired, ratio, speedup, wilson


@pytest.mark.parametrize("successes", [0, 1, 7, 19, 20])
def test_wilson_is_the_formula(successes):
    n, p = 20, successes / 20
    centre, scale = p + Z95**2 / (2 * n), 1 + Z95**2 / n
    spread = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    wanted = (centre - spread) / scale, (centre + spread) / scale
    assert wilson(successes, n) == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (3, 3), (7, 2), (0, 12)])
def test_mcnemar_is_the_formula(b, c):
    first, second = (
        np.repeat([True, False, True], [b, c, 5]),
        np.repeat([False, True, True], [b, c, 5]),
    )
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    assert paired(first, second).p_value == pytest.approx(
        min(1.0, 2 * tail / 2 ** (b + c)), rel=1e-12
    )


def test_a_speedup_is_the_ratio_of_rates_and_its_range_holds_it():
    tokens, seconds = np.array([10, 20]), np.array([[1.0, 2.0], [1.2, 2.2], [0.9, 2.1]])
    value, (low, high) = speedup(tokens, seconds, tokens, 2 * seconds)
    assert value == pytest.approx(2) and low == pytest.approx(2) and high == pytest.approx(2)
    slower = seconds * np.array([[2.0, 3.0], [2.5, 2.5], [3.0, 2.0]])
    value, (low, high) = speedup(tokens, seconds, tokens, slower)
    assert value == pytest.approx(np.median(slower.sum(1)) / np.median(seconds.sum(1)))
    assert low < value < high
    assert speedup(tokens, seconds, tokens, slower) == (value, (low, high))  # the same draws


def test_a_speedup_without_prompts_takes_their_seconds_away_on_both_sides():
    tokens, seconds = np.array([10, 20]), np.array([[2.0, 3.0], [2.2, 3.2], [1.9, 3.1]])
    reading = seconds - 1  # a second is left of every call
    value, interval = speedup(
        tokens, seconds, tokens, 2 * seconds, less=reading, base_less=2 * reading
    )
    assert value == pytest.approx(2) and interval == pytest.approx((2, 2))
    value, interval = speedup(tokens, seconds, tokens, seconds, less=reading, base_less=reading - 1)
    assert value == pytest.approx(2)
    assert speedup(tokens, seconds, tokens, seconds, less=seconds + 1)[1] == (0, math.inf)


def test_what_is_timed_as_a_whole_has_a_range_over_passes():
    seconds, base = [1.0, 1.2, 0.9], [2.2, 2.0, 3.0]
    value, (low, high) = quicker(seconds, base)
    assert (
        value == pytest.approx(2.2)
        and low < value < high
        and low >= 2.0 / 1.2
        and high <= 3.0 / 0.9
    )
    assert quicker(base, seconds)[0] == pytest.approx(1 / value)
    assert quicker(seconds, base, 30, 10)[0] == pytest.approx(3 * value)
    value, interval = quicker([1.0], [2.0])
    assert value == 2 and interval == (0, math.inf) and ends(interval) == [0, None]


def test_problems_are_drawn_alike_for_both_decoders():
    """A decoder that is twice as fast on every problem, however long, is so in every resample."""
    tokens, seconds = np.array([1, 1, 1, 1]), np.array([[1.0, 10.0, 100.0, 1000.0]] * 3)
    assert speedup(tokens, seconds, tokens, 2 * seconds)[1] == pytest.approx((2, 2))
    _, (low, high) = speedup(tokens, seconds, tokens, 2 * seconds[:, ::-1])
    assert low < 0.5 and high > 8


def test_a_ratio_as_text():
    assert times(7.654) == "7.65x" and times(7.654, (7.4, 7.9)) == "7.65x [7.40, 7.90]"
    assert times(7.654, (0.0, math.inf)) == times(7.654, [0.0, None]) == "7.65x, no range"


def test_a_speedup_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"need tokens \[N\]"):
        speedup(np.array([1]), np.ones((2, 2)), np.array([1, 1]), np.ones((2, 2)))
    with pytest.raises(ValueError, match="above 0"):
        speedup(np.array([1]), np.ones((1, 1)), np.array([1]), np.zeros((1, 1)))


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
    assert ratio(np.array([1, 5, 6]), np.array([1, 2, 3])) == pytest.approx(
        (2 - spread, 2 + spread)
    )
    assert ratio(np.array([4, 8]), np.array([1, 2])) == (4.0, 4.0)
    assert ratio(np.array([4]), np.array([1])) == (0.0, np.inf)
    for wrong in (([], []), ([1, 2], [1]), ([1], [0])):
        with pytest.raises(ValueError, match=r"two vectors of one length|sum of the second vector"):
            ratio(*map(np.asarray, wrong))
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        calls = rng.integers(5, 30, 100)
        low, high = ratio(rng.poisson(5 * calls), calls)
        covered += low <= 5 <= high
    assert 0.92 * 400 <= covered <= 0.98 * 400
