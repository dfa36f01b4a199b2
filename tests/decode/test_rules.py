"""Rules that pick positions: small cases by hand, ties, rows without open positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.replicas import masked_rules
from experiments.replicas.masked_rules import time_grid
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.rules import reveal, score, select
from paradec_jax.decode.rules.race import race
from paradec_jax.decode.rules.subs import subs, without_mask

SCORES = jnp.array([[0.9, 0.4, 0.8, 0.8, 0.7], [0.2, 0.3, 0.1, 0.3, 0.0], [0.5] * 5])
OPEN = jnp.array([[False, True, True, True, True], [True] * 5, [False] * 5])


def drawn(chosen) -> list[str]:
    return ["".join("x" if c else "." for c in row) for row in np.asarray(chosen).tolist()]


@pytest.mark.parametrize(
    ("chosen", "want"),
    [
        (lambda: select.top(SCORES, OPEN, 2), ["..xx.", ".x.x.", "....."]),
        (lambda: select.top(SCORES, OPEN, jnp.array([0, 9, 1])), [".....", "xxxxx", "....."]),
        (lambda: reveal.threshold(SCORES, OPEN, 0.8), ["..xx.", ".x...", "....."]),
        (lambda: reveal.threshold(SCORES, OPEN, 0.8, strict=True), ["..x..", ".x...", "....."]),
        (lambda: reveal.threshold(SCORES, OPEN, 0.95), ["..x..", ".x...", "....."]),
        (
            lambda: reveal.threshold(
                SCORES, OPEN, 0.7, strict=True, best=jnp.array([False, False, True])
            ),
            ["..xx.", ".....", "....."],
        ),
        (lambda: reveal.factor(SCORES, OPEN, 0.6), ["..xx.", ".x...", "....."]),
        (lambda: reveal.factor(SCORES, OPEN, 1.0), ["..xx.", ".x...", "....."]),
        (lambda: reveal.factor(SCORES, OPEN, 1.2), ["..xxx", ".x...", "....."]),
        (lambda: reveal.factor(SCORES, OPEN, 4.0), [".xxxx", "xx.x.", "....."]),
        (lambda: reveal.entropy_budget(SCORES, OPEN, 0.5), [".x...", "x.x.x", "....."]),
        (lambda: reveal.entropy_budget(SCORES, OPEN, 1.2), [".x..x", "xxxxx", "....."]),
        (lambda: reveal.entropy_budget(SCORES, OPEN, 2.0), [".xx.x", "xxxxx", "....."]),
        (lambda: reveal.entropy_budget(SCORES, OPEN, 0.0), [".x...", "....x", "....."]),
        (lambda: reveal.entropy_bound(SCORES, OPEN, 0.7), [".x..x", "xxxxx", "....."]),
        (lambda: reveal.entropy_bound(SCORES, OPEN, 0.5), [".x..x", "xxx.x", "....."]),
        (lambda: reveal.entropy_bound(SCORES, OPEN, 0.0), [".x...", "..x.x", "....."]),
        (lambda: select.first(OPEN, 1), [".x...", "x....", "....."]),
        (lambda: select.first(OPEN, jnp.array([3, 0, 1])), [".xxx.", ".....", "....."]),
        (lambda: select.leading(OPEN), [".....", "xxxxx", "....."]),
        (
            lambda: select.top(SCORES, reveal.threshold(SCORES, OPEN, 0.3), 1),
            ["..x..", ".x...", "....."],
        ),
    ],
)
def test_rules_choose_what_their_drawings_say(chosen, want):
    assert drawn(chosen()) == want
    assert not (chosen() & ~OPEN).any()


NAN, INF = float("nan"), float("inf")
RUNNING = jnp.array([[False, True, True, True, True], [True] * 5])
POOR = {
    "NaN": [[NAN] * 5] * 2,
    "inf": [[INF] * 5] * 2,
    "-inf": [[-INF] * 5] * 2,
    "equal": [[0.5] * 5] * 2,
    "mixed": [[0.9, NAN, -INF, NAN, 0.1], [NAN, -INF, NAN, NAN, NAN]],
}


@pytest.mark.parametrize("name", POOR)
def test_every_rule_reveals_something_whatever_the_scores_are(name):
    scores, none = jnp.array(POOR[name]), jnp.zeros_like(RUNNING)
    rules = {
        "quota": lambda s, o: select.top(s, o, 1),
        "threshold": lambda s, o: reveal.threshold(s, o, 2.0),
        "strict": lambda s, o: reveal.threshold(s, o, 2.0, strict=True),
        "factor": lambda s, o: reveal.factor(s, o, 0.5),
        "entropy": lambda s, o: reveal.entropy_budget(s, o, 0.1),
        "bound": lambda s, o: reveal.entropy_bound(s, o, 0.1),
        "order": lambda s, o: select.first(o, 1),
    }
    for rule, choose in rules.items():
        chosen = choose(scores, RUNNING)
        assert chosen.any(axis=1).all() and not (chosen & ~RUNNING).any(), rule
        assert not choose(scores, none).any(), rule
    assert select.top(scores, RUNNING, 9).tolist() == RUNNING.tolist()


def test_nan_is_the_least_sure_score():
    scores = jnp.array(POOR["mixed"])
    assert drawn(select.top(scores, RUNNING, 1)) == ["....x", ".x..."]
    assert drawn(select.top(scores, RUNNING, 2)) == ["..x.x", "xx..."]
    assert drawn(select.top(scores, RUNNING, 3)) == [".xx.x", "xxx.."]
    assert drawn(reveal.threshold(scores, RUNNING, -INF)) == ["..x.x", ".x..."]


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0])
def test_the_mask_is_ruled_out_whatever_its_score_is(value):
    for others in (0.0, NAN, INF):
        logits = jnp.full(5, others).at[0].set(value)
        best = without_mask(logits, 0)
        assert int(jnp.argmax(best)) == 1 and (best[1:] == logits[1:]).all() == (others == others)


@pytest.mark.parametrize("value", [NAN, INF, 0.0])
def test_released_programs_of_masked_diffusion_end_with_no_mask(value):
    probs, tokens, uniforms = (
        jnp.full((1, 2, 5), value),
        jnp.zeros((1, 2), int),
        jnp.full((1, 2, 5), 0.5),
    )
    assert (masked_rules.most_probable(probs, 0) != 0).all()
    weights = masked_rules.analytic_weights(probs, tokens, jnp.array([1e-5]), None, 0)
    assert (race(weights, uniforms) != 0).all()


@pytest.mark.parametrize(("total", "calls"), [(8, 3), (2, 4), (6, 6), (24, 5)])
def test_shares_of_calls(total, calls):
    counts = [int(reveal.share(jnp.array([total]), calls, call)[0]) for call in range(calls)]
    assert (
        sum(counts) == total
        and counts == sorted(counts, reverse=True)
        and counts[0] - counts[-1] <= 1
    )
    sums = [int(reveal.shares(jnp.array([total]), calls, call)[0]) for call in range(calls)]
    assert sums == np.cumsum(counts).tolist()


@pytest.mark.parametrize(
    ("count", "want"),
    [
        (reveal.rounded, [3, 2, 3]),
        (functools.partial(reveal.on_grid, epsilon=1e-3), [2, 2, 4]),
    ],
)
def test_a_schedule_of_the_masks_that_are_left_reveals_all(count, want):
    left, counts = 8, []
    for call in range(3):
        counts.append(int(count(jnp.array([left]), call, 3)[0]))
        left -= counts[-1]
    assert counts == want and left == 0


def test_a_time_grid_truncates_and_its_last_call_reveals_the_rest():
    left, counts = 6, []
    for call in range(6):
        counts.append(int(time_grid(jnp.array([left]), call, 6)[0]))
        left -= counts[-1]
    assert counts == [0, 1, 1, 1, 1, 2]


def test_the_best_come_first_and_the_lower_index_wins_a_tie():
    scores = jnp.array([[0.1, 3.0, 2.0, -1.0, 2.5], [9.0, 1.0, 1.0, 2.0, 0.0]])
    assert select.best(scores, 4).tolist() == [[1, 4, 2, 0], [0, 3, 1, 2]]


@pytest.mark.parametrize(
    ("confidence", "top_p_rule", "first", "margin", "entropy"),
    [
        ("raw", "keep", 0.5, 0.2, 1.142120),
        ("tempered", "keep", 0.588797, 0.304980, 0.990334),
        ("filtered", "keep", 0.602010, 0.311824, 0.904663),  # the third token crosses 0.9 and stays
        ("filtered", "drop", 0.674751, 0.349501, 0.630763),
    ],
)
def test_what_a_confidence_is_taken_from(confidence, top_p_rule, first, margin, entropy):
    """p = .5, .3, .15, .05; p^(1 / 0.7) normalised; the same in the top 0.9 alone, normalised
    again.
    """
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])) + 3.0
    warm = SamplingKnobs(temperature=0.7, top_p=0.9)
    shaped = score.shaped(logits, confidence, warm, top_p_rule=top_p_rule)
    found = score.probability(shaped, jnp.array([0])), score.margin(shaped), score.entropy(shaped)
    np.testing.assert_allclose(np.ravel(found), [first, margin, entropy], atol=2e-6)
    for knobs, want in (
        (SamplingKnobs(temperature=0.0), 0.5),
        (SamplingKnobs(temperature=1.0), 0.5),
        (SamplingKnobs(temperature=0.0, top_k=1), 1.0 if confidence == "filtered" else 0.5),
    ):
        found = score.probability(score.shaped(logits, confidence, knobs, top_p_rule=top_p_rule))
        np.testing.assert_allclose(found, want, atol=2e-6)


# SUBS: what has a gradient; recorded log-probabilities have the rest

MASK = 3
TOKENS = jnp.array([[0, MASK, 4], [2, 1, 0]])  # of the second row, nothing is masked
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)) * 3, jnp.float32)


def test_gradients():
    """None at known positions; the mask's own logit moves no other column, and a divergence stays
    finite.
    """
    weights = jnp.where(jnp.arange(5) == MASK, 0.0, 1.0) * jnp.arange(1.0, 6.0)
    gradient = jax.grad(lambda x: jnp.sum(subs(x, TOKENS, MASK) * weights))(LOGITS)
    assert not gradient[1].any() and not gradient[0, 0].any() and not gradient[0, 2].any()
    assert gradient[0, 1].any() and gradient[0, 1, MASK] == 0

    def divergence(x):
        p, q = subs(x, TOKENS, MASK), subs(LOGITS + 1, TOKENS, MASK)
        return jnp.sum(jnp.exp(p) * (p - q))

    value, gradient = jax.value_and_grad(divergence)(2 * LOGITS)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and gradient[0, 1].any()
