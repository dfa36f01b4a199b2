"""Wilson's interval and McNemar's test against their formulas, at their limits too."""

import math

import numpy as np
import pytest

from paradec_jax.evaluate.intervals import Z95, paired, speedup, wilson


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
    first, second = np.repeat([True, False, True], [b, c, 5]), np.repeat([False, True, True], [b, c, 5])
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    assert paired(first, second).p_value == pytest.approx(min(1.0, 2 * tail / 2 ** (b + c)), rel=1e-12)


def test_a_speedup_is_the_ratio_of_rates_and_its_range_holds_it():
    tokens, seconds = np.array([10, 20]), np.array([[1.0, 2.0], [1.2, 2.2], [0.9, 2.1]])
    value, (low, high) = speedup(tokens, seconds, tokens, 2 * seconds)
    assert value == pytest.approx(2) and low == pytest.approx(2) and high == pytest.approx(2)
    slower = seconds * np.array([[2.0, 3.0], [2.5, 2.5], [3.0, 2.0]])
    value, (low, high) = speedup(tokens, seconds, tokens, slower)
    assert value == pytest.approx(np.median(slower.sum(1)) / np.median(seconds.sum(1)))
    assert low < value < high
    assert speedup(tokens, seconds, tokens, slower) == (value, (low, high))  # the same draws


def test_a_speedup_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"need tokens \[N\]"):
        speedup(np.array([1]), np.ones((2, 2)), np.array([1, 1]), np.ones((2, 2)))
    with pytest.raises(ValueError, match="above 0"):
        speedup(np.array([1]), np.ones((1, 1)), np.array([1]), np.zeros((1, 1)))
