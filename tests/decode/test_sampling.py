"""Draws follow the filtered distribution and belong to a position and a purpose."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.replicas.masked_rules import distribution
from paradec_jax.decode import SamplingKnobs
from paradec_jax.decode.rules.randomness import Purpose
from paradec_jax.decode.rules.relaxation import relaxed
from paradec_jax.decode.rules.sampling import filtered_probabilities, gumbel, sample


def test_draws_follow_the_filtered_distribution():
    draws, vocab = 4_000, 12
    logits = jnp.asarray(np.random.default_rng(0).normal(size=vocab) * 2, jnp.float32)
    knobs = SamplingKnobs(temperature=0.8, top_k=8, top_p=0.9)
    keys = jax.random.split(jax.random.key(3), 4)
    positions = jnp.broadcast_to(jnp.arange(draws // 4), (4, draws // 4))
    drawn = jax.jit(sample)(
        jnp.broadcast_to(logits, (*positions.shape, vocab)), positions, keys, knobs
    )
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=vocab)
    expected = draws * np.asarray(filtered_probabilities(logits, knobs), np.float64)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_squared = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
    assert chi_squared < kept.sum() + 5 * math.sqrt(2 * kept.sum())


FOUR, TEN = (0.15, 0.5, 0.05, 0.3), (0.1,) * 10


@pytest.mark.parametrize(
    ("shares", "top_p", "count"),
    [(FOUR, 0.6, 2), (FOUR, 0.8, 2), (FOUR, 0.81, 3), *((TEN, n / 10, n) for n in range(1, 11))],
)
def test_top_p_keeps_the_fewest_tokens_of_that_mass(shares, top_p, count):
    """As transformers, whatever a sum of float32 is."""
    knobs = SamplingKnobs(temperature=1.0, top_p=top_p)
    assert np.sum(filtered_probabilities(jnp.log(jnp.array(shares)), knobs) > 0) == count


COLD = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12, 1e-20, 1e-30, 1e-36, 1e-38, 1e-40, 1e-45)


@pytest.mark.parametrize("scale", [20.0, 1e4])
def test_a_temperature_near_0_is_greedy(scale):
    logits = jnp.asarray(scale * np.random.default_rng(0).normal(size=(3, 40, 50)), jnp.float32)
    keys, positions = (
        jax.random.split(jax.random.key(0), 3),
        jnp.broadcast_to(jnp.arange(40), (3, 40)),
    )

    @jax.jit
    def drawn(temperature):
        knobs = SamplingKnobs(temperature=temperature)
        probs = filtered_probabilities(logits, knobs)
        return sample(logits, positions, keys, knobs), distribution(logits, knobs), probs

    for temperature in COLD:
        tokens, law, probs = drawn(jnp.float32(temperature))
        assert (tokens == logits.argmax(-1)).all() and (law.argmax(-1) == logits.argmax(-1)).all()
        assert (jnp.abs(probs.sum(-1) - 1) < 1e-6).all() and (
            probs.argmax(-1) == logits.argmax(-1)
        ).all()


def test_equal_logits_share_at_a_temperature_near_0():
    logits = jnp.array([31.3, 47.1, 12.9, 47.1, -8.7])
    law = jax.jit(lambda t: distribution(logits, SamplingKnobs(temperature=t)))
    for temperature in COLD:
        share = [0, 0.5, 0, 0.5, 0] if temperature >= 1e-6 else [0, 1, 0, 0, 0]
        assert law(jnp.float32(temperature)).tolist() == share


def test_a_relaxed_token_is_the_best_one_at_a_temperature_near_0():
    logits, table = jnp.array([[[31.3, 47.1, 12.9]]]), jnp.array([[1.0], [2.0], [4.0]])
    mixed = jax.jit(lambda t: relaxed(table, logits, jnp.array([[0]]), t, "soft"))
    assert [mixed(jnp.float32(t)).tolist() for t in COLD] == [[[[1.0]]]] * len(COLD)


def test_the_tail_of_the_noise_is_gumbels():
    """Of 4 million draws as many lie above 8, .., 13 as `1 - exp(-exp(-x))` says, on no grid that
    ends at 16.
    """
    noise = np.asarray(
        jax.jit(gumbel, static_argnums=1)(jax.random.split(jax.random.key(1), (1, 1)), 1 << 22)
    )
    assert np.isfinite(noise).all()
    for bound in range(8, 14):
        expected = noise.size * -math.expm1(-math.exp(-bound))
        assert abs((noise > bound).sum() - expected) < 5 * math.sqrt(expected), bound
    # Numbers of 23 bits have 140 values above 11, and 70 draws would meet on some.
    highest = noise[noise > 11]
    assert len(np.unique(highest)) == len(highest) > 40


def test_draws_belong_to_position_and_purpose():
    logits = jnp.zeros((1, 6, 50))
    key, knobs = jax.random.split(jax.random.key(0), 1), SamplingKnobs(temperature=1.0)
    positions = jnp.arange(6)[None]
    whole = sample(logits, positions, key, knobs)
    np.testing.assert_array_equal(
        sample(logits[:, 2:5], positions[:, 2:5], key, knobs), whole[:, 2:5]
    )
    assert (sample(logits, positions, key, knobs, purpose=Purpose.DRAFT) != whole).any()
    assert len(set(whole[0].tolist())) > 1
