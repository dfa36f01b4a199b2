"""The train step: what it applies, donates, accumulates, averages and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_regression import Batches, initial_params, loss

from paradec_jax.objective import Objective
from paradec_jax.train import TrainState, make_train_step, update_ema


def quiet(params, frozen, batch, key):
    """The sums of `noisy_regression.loss`, whose micro-batches have the same noise."""
    return loss.sums(params, frozen, batch, jax.random.key(0))


def test_non_finite_update_is_not_applied():
    optimizer = optax.adam(0.1)
    state = TrainState.create(initial_params(), optimizer, jax.random.key(0), ema=True)
    before = jax.tree.map(np.array, (state.params, state.ema, state.opt_state, state.step))
    state, metrics = make_train_step(loss, optimizer, ema_decay=0.9)(state, next(Batches(bad=0)))
    assert not metrics["finite"]
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        (state.params, state.ema, state.opt_state, state.step),
    )


def test_step_donates_its_state_and_nothing_else():
    optimizer, params, key = optax.adam(0.1), initial_params(), jax.random.key(0)
    state = TrainState.create(params, optimizer, key, ema=True)
    step = make_train_step(loss, optimizer, ema_decay=0.9)
    old = state.params["embedding"]
    for _ in range(2):
        state, metrics = step(state, next(Batches()))
    assert old.is_deleted() and not params["embedding"].is_deleted() and not key.is_deleted()
    assert (
        state.step == 2
        and metrics["finite"]
        and metrics.keys() == {"loss", "noise", "grad_norm", "finite"}
    )
    assert step.jitted._cache_size() == 1


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [3, 0.5, 0, 0], [0, 0, 0, 0]])
def test_accumulation_equals_the_full_batch(weights):
    """Whatever the micro-batches count: all alike, some hardly anything, one or all of them
    nothing.
    """
    batch, results = next(Batches()) | {"weights": np.asarray(weights, np.float32)}, []
    for accumulate in (1, 2, 4):
        state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
        step = make_train_step(Objective(quiet), optax.sgd(0.1), accumulate=accumulate)
        state, metrics = step(state, batch)
        results.append((state.params, metrics))
    assert (results[0][1]["grad_norm"] > 0) == any(weights)
    for result in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), results[0], result
        )


def test_micro_batches_draw_different_noise():
    state = TrainState.create(initial_params(), optax.sgd(0.0), jax.random.key(0))
    step = make_train_step(loss, optax.sgd(0.0), accumulate=2)
    _, metrics = step(state, next(Batches()))
    key = jax.random.fold_in(jax.random.key(0), 0)
    draws = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(2)]
    np.testing.assert_allclose(metrics["noise"], np.mean(draws), rtol=1e-6)


def test_ema_formula():
    ema, average = {"w": jnp.zeros(2)}, 0.0
    for t, value in enumerate([1.0, 2.0, 3.0]):
        ema = update_ema(ema, {"w": jnp.full(2, value, jnp.bfloat16)}, jnp.int32(t), 0.22)
        d = min(0.22, (2 + t) / (11 + t))
        average = d * average + (1 - d) * value
    np.testing.assert_allclose(ema["w"], average, rtol=1e-6)
    assert ema["w"].dtype == jnp.float32


def test_the_warm_up_of_the_average_rules_short_runs():
    """Below 90,000 updates a limit of 0.9999 and one of 0.99999 are the same."""

    def after(count, decay):
        return float(update_ema({"w": jnp.ones(1)}, {"w": jnp.zeros(1)}, count, decay)["w"][0])

    assert after(9_999, 0.9999) == after(9_999, 0.99999) == pytest.approx(10_001 / 10_010)
    assert after(99_999, 0.9999) < after(99_999, 0.99999)


def test_step_refuses_bad_input():
    state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"batch\['inputs'\] has shape \(4, 3\); its first axis must be"
    ):
        make_train_step(Objective(quiet), optax.sgd(0.1), accumulate=3)(state, next(Batches()))
    with pytest.raises(
        ValueError, match="accumulate=2 needs a loss that says its sums and weights"
    ):
        make_train_step(lambda *arguments: loss(*arguments), optax.sgd(0.1), accumulate=2)
    with pytest.raises(ValueError, match="the state has no ema"):
        make_train_step(loss, optax.sgd(0.1), ema_decay=0.5)(state, next(Batches()))
    with pytest.raises(TypeError, match="typed PRNG key"):
        TrainState.create(initial_params(), optax.sgd(0.1), jax.random.PRNGKey(0))
