"""Schedules against their definitions, drawn times, and what is hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over

from paradec_jax.noise import LOGLINEAR, Schedule, Times, hide, rounded_up
from paradec_jax.noise.schedules import FORMULAS

T = jnp.linspace(0.02, 0.98, 25)


@over(FORMULAS)
def test_schedules_agree_with_their_noise(name):
    """The weight is m' / m and sigma' / (exp(sigma) - 1), and times are those of their
    probabilities.
    """
    schedule = Schedule(name)
    m, sigma = schedule.mask_probability(T), schedule.sigma(T)
    slope, rate = (jax.vmap(jax.grad(f))(T) for f in (schedule.mask_probability, schedule.sigma))
    np.testing.assert_allclose(schedule.weight(T), slope / m, rtol=1e-3)
    np.testing.assert_allclose(schedule.weight(T), rate / np.expm1(sigma), rtol=1e-3)
    np.testing.assert_allclose(schedule.time(m), T, rtol=1e-3)


@over([1e-5, 3e-4, 0.1, 1.0], argument="t")
def test_the_weight_of_the_log_linear_schedule_loses_no_digit(t):
    assert LOGLINEAR.weight(jnp.float32(t)) == jnp.float32(1) / jnp.float32(t)


@over(FORMULAS)
def test_importance_spreads_the_log_mask_probability_evenly(name):
    schedule = Schedule(name)
    low, high = schedule.log_range
    spread = jnp.log(schedule.mask_probability(schedule.importance(T)))
    np.testing.assert_allclose(spread, low + T * (high - low), atol=2e-3)


def test_each_rule_of_times():
    keys = jax.random.split(jax.random.key(0), 200)
    rows = 8
    for rule in ("stratified", "systematic"):
        tau = (
            np.asarray(jax.vmap(lambda key, rule=rule: Times(rule, 1e-3).draw(key, rows))(keys))
            - 1e-3
        ) / 0.999
        assert (
            np.sort((tau * rows).astype(int), axis=1) == np.arange(rows)
        ).mean() > 0.999  # one a part
    gaps = np.diff(np.sort(tau, axis=1), axis=1)  # of the systematic ones
    np.testing.assert_allclose(gaps, 1 / rows, atol=1e-5)
    plain = np.asarray(jax.vmap(lambda key: Times("plain", 0.5).draw(key, rows))(keys))
    assert plain.min() >= 0.5 and plain.max() < 1 and abs(plain.mean() - 0.75) < 0.02
    assert len(np.unique(plain)) == plain.size


def test_what_is_hidden_and_times_of_the_discrete_bound():
    tokens = jnp.arange(8).reshape(2, 4)
    uniforms = jnp.array([[0.0, 0.5, 0.4, 0.9], [0.1, 0.2, 0.3, 0.4]])
    where = jnp.array([[True, True, True, True], [False, True, True, True]])
    got, hidden = hide(tokens, uniforms, jnp.array([0.5, 0.35]), 99, where)
    assert got.tolist() == [[99, 1, 99, 3], [4, 99, 99, 7]]
    assert np.array_equal(hidden, got == 99)
    assert not hide(tokens, uniforms, jnp.zeros(2), 99)[1].any()
    assert hide(tokens, uniforms, jnp.ones(2), 99)[1].all()
    times = rounded_up(jnp.array([1e-3, 0.25, 0.26, 0.999, 1.0]), 4)
    np.testing.assert_allclose(times, [0.25, 0.5, 0.5, 1.0, 1.0])


@over(
    [
        (
            lambda: Times("antithetic"),
            "rule must be one of plain, stratified, systematic, not 'antithetic'",
        ),
        (lambda: Times(floor=0.0), r"floor must be in \(0, 1\), not 0.0"),
        (lambda: Schedule("sine"), "name must be one of loglinear, cosine, .* not 'sine'"),
        (
            lambda: Times("systematic").at(jnp.zeros(3), 3),
            "systematic times of 3 rows come from 1 numbers",
        ),
        (
            lambda: Times().at(jnp.zeros(2), 3),
            "stratified times of 3 rows come from 3 numbers, not 2",
        ),
    ],
    argument="make, message",
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
