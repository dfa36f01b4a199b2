"""Optimizers and their schedule: what decays, what Muon orthogonalises."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_regression import initial_params

from paradec_jax.train import adamw, muon, warmup_stable_decay
from paradec_jax.train.optimizers import decay_mask


@pytest.mark.slow
def test_decay_spares_norms_and_biases():
    params = initial_params()
    mask = decay_mask(params)
    assert mask == {
        "embedding": True,
        "mlp": {"kernel": True, "bias": False},
        "norm": {"scale": False},
    }
    optimizer = adamw(0.5, 10, weight_decay=0.1)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    wanted = jax.tree.map(lambda p, decays: -0.05 * p * decays, params, mask)
    chex.assert_trees_all_close(updates, wanted, atol=1e-7)


def test_muon_orthogonalises_named_matrices_apart():
    rng = np.random.default_rng(0)
    shapes = {"pair": (6, 2, 4), "square": (8, 8), "norm": (8,)}
    params = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    axes = {"pair$": ((0,), (2,)), "square$": ((0,), (1,))}
    options = {"warmup": 2, "cooldown": 2}
    optimizer = muon(0.5, 10, axes=axes, weight_decay=0.0, adam_learning_rate=0.1, **options)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for update, gradient, larger in (
        (updates["pair"][:, 0], gradients["pair"][:, 0], 6),
        (updates["pair"][:, 1], gradients["pair"][:, 1], 6),
        (updates["square"], gradients["square"], 8),
    ):
        singular = np.linalg.svd(update, compute_uv=False)
        wanted = 0.25 * 0.2 * larger**0.5  # the first update has half the peak
        assert 0.6 * wanted < singular.min() <= singular.max() < 1.3 * wanted
        assert np.sum(np.asarray(update) * np.asarray(gradient)) < 0
    adam = optax.nadam(0.05, b2=0.95)
    clipped = gradients["norm"] / optax.tree.norm(gradients)
    alone, _ = adam.update(clipped, adam.init(params["norm"]))
    np.testing.assert_allclose(updates["norm"], alone, rtol=1e-5)

    decaying = muon(0.5, 10, axes=axes, weight_decay=0.1, **options)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = decaying.update(zeros, decaying.init(params), params)
    np.testing.assert_allclose(updates["square"], -0.025 * params["square"], rtol=1e-5)
    assert not updates["norm"].any()


def test_warmup_stable_decay():
    schedule = warmup_stable_decay(2.0, 10, warmup=4, cooldown=2)
    np.testing.assert_allclose(
        [schedule(t) for t in range(11)], [0.5, 1, 1.5, 2, 2, 2, 2, 2, 2, 1, 0]
    )
    np.testing.assert_allclose([warmup_stable_decay(2.0, 3)(t) for t in range(3)], 2)
    with pytest.raises(ValueError, match="must fit into steps 5"):
        warmup_stable_decay(1.0, 5, warmup=3, cooldown=3)
