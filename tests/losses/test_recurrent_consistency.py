"""Consistency distillation of recurrent-depth models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stubs import tiny_params

from experiments.recurrent_depth.recurrent_consistency import recurrent_consistency_loss
from paradec_jax.config import RECURRENT_PRESETS, TokenSpec
from paradec_jax.losses.consistency import ConsistencyRules
from paradec_jax.models import RecurrentDepthNetwork

NETWORK = RecurrentDepthNetwork(RECURRENT_PRESETS["test-recurrent"])
SPEC = TokenSpec(bos=1, stop=(2,), pad=0)
RULES = ConsistencyRules(context="clean", after_eos="keep", ar_weight=2.0)
PROMPT, BLOCK = 4, 3


@pytest.fixture(scope="module")
def params():
    return tiny_params()


@pytest.fixture(scope="module")
def batch():
    return {
        "prompt": jnp.array([[5, 6, 7, 8], [9, 10, 11, 12]]),
        "prompt_lengths": jnp.array([4, 4]),
        "noisy": jnp.array([[[13, 30, 29]], [[28, 17, 18]]]),
        "clean": jnp.array([[[13, 14, 15]], [[16, 17, 18]]]),
        "pairs": jnp.array([1, 1]),
        "step": jnp.int32(0),
    }


def always(recurrence):
    return lambda key, step: jnp.int32(recurrence)


@functools.partial(jax.jit, static_argnums=3)
def read(params, tokens, state, recurrence):
    """Logits of an ordinary causal pass from given states."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out, _ = NETWORK.at(recurrence).forward_from(params, tokens, positions, state)
    return NETWORK.logits(params, out.hidden)


def test_equals_two_causal_passes(params, batch):
    """The loss by hand: one pass over the prompt with its noisy block, one with its clean block."""
    recurrence = 3
    loss = recurrent_consistency_loss(NETWORK, always(recurrence), 2, SPEC, RULES)
    key = jax.random.key(4)
    value, terms = jax.jit(loss)(params, params, batch, key)

    keys = jax.random.split(jax.random.split(key, 4)[1], (2, PROMPT + 2 * BLOCK))
    states = NETWORK.initial_state(keys)
    before, noisy, clean = jnp.split(states, [PROMPT, PROMPT + BLOCK], axis=1)
    said, wanted = (
        read(
            params, jnp.concatenate([batch["prompt"], batch[name][:, 0]], axis=1), state, recurrence
        )
        for name, state in (
            ("noisy", jnp.concatenate([before, noisy], axis=1)),
            ("clean", jnp.concatenate([before, clean], axis=1)),
        )
    )
    divergence = optax.softmax_cross_entropy(said[:, PROMPT:], jax.nn.softmax(wanted[:, PROMPT:]))
    # From the first wrong token on: offsets 1 and 2 of the first row, all of the second.
    expected = (divergence[0, 1:].mean() + divergence[1].mean()) / 2
    np.testing.assert_allclose(terms["consistency"], expected, rtol=1e-5)
    tokens = jnp.concatenate([batch["prompt"], batch["clean"][:, 0]], axis=1)
    next_token = optax.softmax_cross_entropy_with_integer_labels(
        wanted[:, :-1], tokens[:, 1:]
    ).mean()
    np.testing.assert_allclose(terms["ar"], next_token, rtol=1e-5)
    np.testing.assert_allclose(value, 2.0 * next_token + expected, rtol=1e-5)
    assert terms["recurrence"] == recurrence
