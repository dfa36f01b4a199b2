"""The bound as a loss: what it counts, that it is finite where the original is not, and its
options.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import read
from stubs import (
    JointDenoiser,
    tiny_denoiser,
    tiny_denoiser_params,
    tiny_full,
    tiny_full_params,
)

from paradec_jax.config import TokenSpec
from paradec_jax.losses import BoundRules, masked_diffusion_loss
from paradec_jax.noise import Schedule, Times

EXACT = JointDenoiser(
    3, 4, tuple(np.exp(np.random.default_rng(0).normal(scale=1.5, size=81)).tolist())
)
EXACT_SPEC = TokenSpec(mask=EXACT.mask, alignment="own")
SPEC = TokenSpec(mask=31, alignment="own")
NETWORK = tiny_denoiser(vocab_size=32, layers=1)
BATCH = {
    "tokens": jax.random.randint(jax.random.key(1), (3, 7), 0, 31),
    "weights": jnp.ones((3, 7)),
    "time_uniforms": jax.random.uniform(jax.random.key(2), (3,)),
    "mask_uniforms": jax.random.uniform(jax.random.key(3), (3, 7)),
}


def params_of():
    return tiny_denoiser_params(2, vocab_size=32, layers=1)


@functools.cache
def step_of(rules, dropout):
    objective = masked_diffusion_loss(NETWORK, SPEC, rules, dropout=dropout)
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def graded(batch, rules=BoundRules(), key=0, dropout=False):  # noqa: B008
    (loss, metrics), grads = step_of(rules, dropout)(params_of(), None, batch, jax.random.key(key))
    return loss, metrics, grads


def test_only_hidden_positions_cost_and_all_real_ones_are_counted():
    hidden = jnp.zeros((3, 7)).at[0, 2].set(-1).at[2, 5].set(-1).at[1, 3].set(-1) + 1
    batch = BATCH | {"time_uniforms": jnp.array([0.5, 0.5, 0.5]), "mask_uniforms": hidden}
    loss, metrics, _ = graded(batch)
    np.testing.assert_allclose(metrics["hidden"], 3 / 21, rtol=1e-6)
    longer = batch | {"weights": jnp.ones((3, 7)).at[1, 3].set(0).at[:, 6].set(0)}
    less, metrics, _ = graded(longer)
    np.testing.assert_allclose(metrics["hidden"], 2 / 17, rtol=1e-6)
    assert less != loss


def test_discrete_time_is_finite_at_its_first_step():
    """t = 1 / T, where the original divides zero by zero; and t = 1."""
    batch = BATCH | {
        "time_uniforms": jnp.array([0.0, 0.5, 0.999]),
        "mask_uniforms": jnp.zeros((3, 7)),
    }
    rules = BoundRules(steps=4, times=Times("plain", 1e-5))
    probability, weight = rules.at(rules.times.at(batch["time_uniforms"], 3))
    np.testing.assert_allclose(probability, [0.999 / 4, 0.999 * 3 / 4, 0.999], rtol=1e-6)
    np.testing.assert_allclose(weight, [4, 4 / 3, 1], rtol=1e-6)
    assert np.isfinite(graded(batch, rules)[0])
    released = dataclasses.replace(rules, released=True)
    np.testing.assert_allclose(
        released.at(jnp.array([0.0, 0.999]))[1], [4, 1 / (1 - 1e-4)], rtol=1e-6
    )


def test_importance_and_change_of_variables_are_one():
    t = jnp.linspace(1e-3, 1, 9)
    by_time = BoundRules(measure="importance").at(t)
    directly = BoundRules(measure="change_of_variables").at(t)
    chex.assert_trees_all_close(by_time, directly, rtol=1e-4)
    np.testing.assert_allclose(directly[1], np.log(0.999) - np.log(-np.expm1(-1e-3)), rtol=1e-6)
    released = BoundRules(measure="importance", released=True).at(t)
    np.testing.assert_allclose(released[1], -np.log(-np.expm1(-1e-3)), rtol=1e-6)


@pytest.mark.parametrize(
    "rules",
    [
        BoundRules(times=Times("stratified", 1e-5)),
        BoundRules(schedule=Schedule("cosine"), times=Times("systematic", 1e-4)),
        BoundRules(schedule=Schedule("cosine_squared"), times=Times("stratified", 1e-4)),
        BoundRules(
            schedule=Schedule("linear"), measure="importance", times=Times("systematic", 1e-5)
        ),
        BoundRules(measure="importance", times=Times("systematic", 1e-5)),
        BoundRules(measure="change_of_variables", times=Times("stratified", 1e-5)),
        BoundRules(steps=1000, times=Times("systematic", 1e-5)),
        BoundRules(schedule=Schedule("ratio"), times=Times("systematic", 1e-4)),
    ],
    ids=[
        "time",
        "cosine",
        "cosine-squared",
        "linear",
        "importance",
        "change-of-variables",
        "steps",
        "ratio",
    ],
)
def test_every_way_of_drawing_bounds_the_likelihood(rules):
    """With the exact posterior the bound is the negative log-likelihood itself, up to what lies
    beyond the ends.
    """
    objective = masked_diffusion_loss(EXACT, EXACT_SPEC, rules, dropout=False)
    text = 40
    rows = 512
    batch = {
        "tokens": jnp.broadcast_to(jnp.asarray(EXACT.texts[text], jnp.int32), (rows, EXACT.length))
    }
    draw = jax.jit(lambda key: objective(None, None, batch, key)[0])
    values = np.asarray(jax.lax.map(draw, jax.random.split(jax.random.key(3), 40))) * EXACT.length
    error = values.std(ddof=1) / np.sqrt(len(values))
    wanted = -np.log(EXACT.law[text])
    assert abs(values.mean() - wanted) < 4 * error + 0.005 * wanted and error < 0.04 * wanted


@pytest.mark.parametrize("cart", [None, 0.3])
def test_the_next_token_is_predicted_from_the_one_before_it(cart):
    """By a plain program, with the bound's weights and with those of CART."""
    network, params, spec = (
        tiny_full(),
        tiny_full_params(),
        dataclasses.replace(SPEC, alignment="next"),
    )
    rules = BoundRules(Schedule("ratio"), Times("plain"), cart=cart)
    objective = jax.jit(masked_diffusion_loss(network, spec, rules))
    loss, metrics = objective(params, None, BATCH, jax.random.key(0))
    t, uniforms = 1e-3 + 0.999 * BATCH["time_uniforms"], BATCH["mask_uniforms"]
    hidden = np.asarray(uniforms < t[:, None]) & (np.arange(7) > 0)
    logits, _, _ = read(network, params, jnp.where(hidden, 31, BATCH["tokens"]))
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    costs, tokens = 0.0, np.asarray(BATCH["tokens"])
    for row, at in np.argwhere(hidden):
        seen = [abs(at - j) for j in range(7) if not hidden[row, j]]
        weight = 1 / t[row] if cart is None else sum(0.15 * 0.7 ** (d - 1) for d in seen)
        costs -= weight * log_probs[row, at - 1, tokens[row, at]]
    np.testing.assert_allclose(loss, costs / 18, rtol=1e-5)
    np.testing.assert_allclose(metrics["hidden"], hidden.sum() / 18, rtol=1e-6)


def test_dropout_needs_its_key_and_its_rate():
    batch = BATCH | {
        "time_uniforms": jnp.array([0.9, 0.9, 0.9]),
        "mask_uniforms": jnp.zeros((3, 7)),
    }
    first, second = (graded(batch, key=key, dropout=True)[0] for key in (0, 1))
    assert first != second  # nothing else is drawn here
    assert graded(batch, key=0)[0] == graded(batch, key=1)[0]
