"""Bounds of texts under a denoiser: against the exact likelihood of a small joint, with their
errors.
"""

import math

import numpy as np
import pytest
from stubs import JointDenoiser

from experiments.masked_diffusion.held_out import per_token
from paradec_jax.evaluate.bound import Bound, bounds
from paradec_jax.evaluate.likelihood import Span

WEIGHTS = tuple(np.exp(np.random.default_rng(0).normal(scale=1.5, size=81)).tolist())
EXACT = JointDenoiser(symbols=3, length=4, weights=WEIGHTS, max_length=4)
JOINT = EXACT.law.reshape([3] * 4)
TEXTS = [tuple(map(int, EXACT.texts[i])) for i in (3, 17, 40, 76)]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_the_exact_posterior_gives_the_likelihood(start):
    """Its bound is tight, whatever the order in which positions are revealed."""
    spans = [Span(text, start) for text in TEXTS]
    found = bounds(EXACT, None, spans, EXACT.mask, draws=4096, batch=512)
    for bound, text in zip(found, TEXTS, strict=True):
        assert bound.count == 4 - start and 0 <= bound.error < 0.4
        assert (bound.error == 0) == (bound.count == 1)  # which one draw gives
        # -log p(text[start:] | text[:start])
        nats = -math.log(JOINT[text] / JOINT[text[:start]].sum())
        assert abs(bound.nats - nats) < 4 * bound.error + 1e-6


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_an_order_gives_the_likelihood(order):
    """In as many calls as there are positions; of a law that knows its texts the same in both."""
    spans = [Span(TEXTS[0], 1), Span(TEXTS[1])]
    for bound, span in zip(bounds(EXACT, None, spans, EXACT.mask, order=order), spans, strict=True):
        nats = -math.log(JOINT[span.ids] / JOINT[span.ids[: span.start]].sum())
        assert bound.nats == pytest.approx(nats, rel=1e-5) and bound.error == 0


def test_what_is_not_scored_is_seen():
    """The middle given both ends."""
    span = Span(TEXTS[2], 1, 3)
    found = bounds(EXACT, None, [span], EXACT.mask, draws=2048, batch=256)[0]
    a, _, _, d = TEXTS[2]
    want = -math.log(JOINT[TEXTS[2]] / JOINT[a, :, :, d].sum())
    assert found.count == 2 and abs(found.nats - want) < 4 * found.error + 0.01


def test_rows_do_not_know_of_each_other():
    spans = [Span(text) for text in TEXTS]
    together = bounds(EXACT, None, spans, EXACT.mask, draws=6, batch=4)
    for i, span in enumerate(spans):
        alone = bounds(EXACT, None, [span], EXACT.mask, draws=6, batch=5, streams=[i])[0]
        np.testing.assert_allclose(
            (alone.nats, alone.error), (together[i].nats, together[i].error), rtol=1e-5
        )


def test_a_longer_buffer_changes_nothing():
    """Rows are padded to the smallest batch where the network allows it, and the padding is not
    seen.
    """
    padded = JointDenoiser(symbols=3, length=4, weights=WEIGHTS, max_length=64)
    spans = [Span(TEXTS[0], 1), Span(TEXTS[1])]
    plain, longer = (
        bounds(network, None, spans, EXACT.mask, draws=6) for network in (EXACT, padded)
    )
    for one, other in zip(plain, longer, strict=True):
        np.testing.assert_allclose((one.nats, one.error), (other.nats, other.error), rtol=1e-5)


def test_rows_of_one_stream_share_times_and_masks():
    twice = [Span(TEXTS[0]), Span(TEXTS[0])]
    first, second = bounds(EXACT, None, twice, EXACT.mask, draws=4, streams=[7, 7])
    assert first == second
    first, second = bounds(EXACT, None, twice, EXACT.mask, draws=4)
    assert first.nats != second.nats
    again = bounds(EXACT, None, twice, EXACT.mask, draws=4, seed=1)[0]
    assert again.nats != first.nats


def test_the_mean_over_tokens():
    found = [Bound(6.0, 0.1, 3), Bound(2.0, 0.1, 2), Bound(4.0, 0.1, 1)]
    mean, error = per_token(found)
    assert mean == 2.0
    assert error == pytest.approx(math.sqrt(1.5 * (0 + 4 + 4)) / 6)
    assert per_token(found[:1]) == (2.0, math.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": [Span((0,) * 5)]}, "a row of 5 ids that scores 0 to 5 does not fit"),
        ({"spans": [Span((0, 1), 2)]}, "scores 2 to 2 does not fit"),
        ({"spans": [Span((0, 1), 0, 3)]}, "scores 0 to 3 does not fit"),
        ({"alignment": "next"}, "scores 0 to 4 does not fit: it must score at least one, from 1"),
        ({"order": "left"}, "order must be one of random, forward, backward, not 'left'"),
        ({"draws": 1}, "draws must be at least 2"),
    ],
)
def test_what_is_refused(change, message):
    options = {"spans": [Span(TEXTS[0])]} | change
    with pytest.raises(ValueError, match=message):
        bounds(EXACT, None, mask=EXACT.mask, **options)
