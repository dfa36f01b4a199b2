"""The train step: what it applies, donates, accumulates, averages and refuses."""

import jax
import numpy as np
import optax
import pytest
from noisy_regression import Batches, initial_params, loss

from paradec_jax.objective import Objective
from paradec_jax.train import TrainState, make_train_step


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


def test_micro_batches_draw_different_noise():
    state = TrainState.create(initial_params(), optax.sgd(0.0), jax.random.key(0))
    step = make_train_step(loss, optax.sgd(0.0), accumulate=2)
    _, metrics = step(state, next(Batches()))
    key = jax.random.fold_in(jax.random.key(0), 0)
    draws = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(2)]
    np.testing.assert_allclose(metrics["noise"], np.mean(draws), rtol=1e-6)


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
