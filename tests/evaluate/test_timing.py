"""Decoders that are timed in turns: what is counted."""

import pytest
from stub_table import STUB

import paradec_jax as pd
from paradec_jax.decode import make_request
from paradec_jax.evaluate.timing import Case, measure


def requests(count):
    return [make_request([[1, 5 + i, 7]], max_new_tokens=6, seed=i) for i in range(count)]


def test_measure():
    cases = [Case(pd.Static(STUB, 16, recurrence=r), {}) for r in (1, 2)]
    done = []
    speeds = measure(cases, requests(2), passes=3, advance=done.append)
    assert sum(done) == 2 * (3 + 1)
    for speed, r in zip(speeds, (1, 2), strict=True):
        assert (speed.batch, speed.tokens, speed.calls, speed.generated) == (1, 12, 10, (6, 6))
        assert (speed.counts["network_calls"], speed.counts["recurrences"]) == (12, 12 * r)
        assert len(speed.passes) == 3 and speed.seconds == sorted(speed.passes)[1]
        assert speed.passes == tuple(sum(each) for each in speed.each)
        assert sorted(sum(each) for each in speed.each_reading)[1] == speed.init_seconds
        assert speed.tokens_per_second == pytest.approx(12 / speed.seconds)
