"""Schedules against their definitions, drawn times, and what is hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paradec_jax.noise import (
    SCHEDULES,
    Cosine,
    Geometric,
    Linear,
    LogLinear,
    Times,
    hide,
    importance,
    log_probability_range,
    rounded_up,
)

T = jnp.linspace(0.02, 0.98, 25)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree_with_their_noise(name):
    schedule = SCHEDULES[name]
    np.testing.assert_allclose(schedule.mask_probability(T), -np.expm1(-schedule.sigma(T)), rtol=2e-4)
    rate = jax.vmap(jax.grad(lambda t: schedule.sigma(t)))(T)
    np.testing.assert_allclose(schedule.rate(T), rate, rtol=1e-3)
    slope = jax.vmap(jax.grad(lambda t: schedule.mask_probability(t)))(T)
    np.testing.assert_allclose(schedule.weight(T), slope / schedule.mask_probability(T), rtol=1e-3)
    np.testing.assert_allclose(schedule.weight(T), rate / np.expm1(schedule.sigma(T)), rtol=1e-3)
    np.testing.assert_allclose(schedule.time(schedule.mask_probability(T)), T, rtol=1e-3)


@pytest.mark.parametrize("t", [1e-5, 3e-4, 0.1, 1.0])
def test_the_weight_of_the_log_linear_schedule_loses_no_digit(t):
    assert LogLinear().weight(jnp.float32(t)) == jnp.float32(1) / jnp.float32(t)


@pytest.mark.parametrize("name", SCHEDULES)
def test_importance_spreads_the_log_mask_probability_evenly(name):
    schedule = SCHEDULES[name]
    low, high = log_probability_range(schedule)
    found = jnp.log(schedule.mask_probability(importance(schedule, T)))
    np.testing.assert_allclose(found, low + T * (high - low), atol=2e-3)


def test_each_rule_of_times():
    keys = jax.random.split(jax.random.key(0), 200)
    rows = 8
    for rule in ("stratified", "systematic"):
        tau = (
            np.asarray(jax.vmap(lambda key, rule=rule: Times(rule, 1e-3).draw(key, rows))(keys)) - 1e-3
        ) / 0.999
        assert (np.sort((tau * rows).astype(int), axis=1) == np.arange(rows)).mean() > 0.999  # one a part
    gaps = np.diff(np.sort(tau, axis=1), axis=1)  # of the systematic ones
    np.testing.assert_allclose(gaps, 1 / rows, atol=1e-5)
    plain = np.asarray(jax.vmap(lambda key: Times("plain", 0.5).draw(key, rows))(keys))
    assert plain.min() >= 0.5 and plain.max() < 1 and abs(plain.mean() - 0.75) < 0.02
    assert len(np.unique(plain)) == plain.size


def test_times_are_rounded_up():
    got = rounded_up(jnp.array([1e-3, 0.25, 0.26, 0.999, 1.0]), 4)
    np.testing.assert_allclose(got, [0.25, 0.5, 0.5, 1.0, 1.0])


def test_what_is_hidden():
    tokens = jnp.arange(8).reshape(2, 4)
    uniforms = jnp.array([[0.0, 0.5, 0.4, 0.9], [0.1, 0.2, 0.3, 0.4]])
    where = jnp.array([[True, True, True, True], [False, True, True, True]])
    got, hidden = hide(tokens, uniforms, jnp.array([0.5, 0.35]), 99, where)
    assert got.tolist() == [[99, 1, 99, 3], [4, 99, 99, 7]]
    assert np.array_equal(hidden, got == 99)
    assert not hide(tokens, uniforms, jnp.zeros(2), 99)[1].any()
    assert hide(tokens, uniforms, jnp.ones(2), 99)[1].all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Times("antithetic"), "rule must be one of plain, stratified, systematic, not 'antithetic'"),
        (lambda: Times(floor=0.0), r"floor must be in \(0, 1\), not 0.0"),
        (lambda: LogLinear(1.0), r"epsilon must be in \(0, 1\), not 1.0"),
        (lambda: Cosine(0.0), "epsilon"),
        (lambda: Linear(2.0, 1.0), "above 0 and ascend, not 2.0 and 1.0"),
        (lambda: Geometric(0.0, 1.0), "above 0 and ascend"),
        (
            lambda: Times("systematic").at(jnp.zeros(3), 3),
            "systematic times of 3 rows come from 1 numbers, not 3",
        ),
        (lambda: Times().at(jnp.zeros(2), 3), "stratified times of 3 rows come from 3 numbers, not 2"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
