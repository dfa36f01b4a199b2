"""Wilson's interval and McNemar's test against their formulas, at their limits too."""

import math

import numpy as np
import pytest

from paradec_jax.evaluate.intervals import Z95, paired, wilson


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
