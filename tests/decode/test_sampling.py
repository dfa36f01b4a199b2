"""Draws follow the filtered distribution and belong to a position and a purpose."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.decode import SamplingKnobs
from paradec_jax.decode.rules.randomness import Purpose
from paradec_jax.decode.rules.sampling import filtered_probabilities, sample


def test_draws_follow_the_filtered_distribution():
    draws, vocab = 4_000, 12
    logits = jnp.asarray(np.random.default_rng(0).normal(size=vocab) * 2, jnp.float32)
    knobs = SamplingKnobs(temperature=jnp.float32(0.8), top_k=jnp.int32(8), top_p=jnp.float32(0.9))
    keys = jax.random.split(jax.random.key(3), 4)
    positions = jnp.broadcast_to(jnp.arange(draws // 4), (4, draws // 4))
    drawn = jax.jit(sample)(jnp.broadcast_to(logits, (*positions.shape, vocab)), positions, keys, knobs)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=vocab)
    expected = draws * np.asarray(filtered_probabilities(logits, knobs), np.float64)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_squared = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
    assert chi_squared < kept.sum() + 5 * math.sqrt(2 * kept.sum())


def test_draws_belong_to_position_and_purpose():
    logits = jnp.zeros((1, 6, 50))
    key, knobs = jax.random.split(jax.random.key(0), 1), SamplingKnobs(temperature=jnp.float32(1.0))
    positions = jnp.arange(6)[None]
    whole = sample(logits, positions, key, knobs)
    np.testing.assert_array_equal(sample(logits[:, 2:5], positions[:, 2:5], key, knobs), whole[:, 2:5])
    assert (sample(logits, positions, key, knobs, purpose=Purpose.DRAFT) != whole).any()
    assert len(set(whole[0].tolist())) > 1
