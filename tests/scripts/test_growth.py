"""Deeper networks from trained ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recurrent_depth.growth import deepen_core
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.models import RecurrentDepthNetwork

CONFIG = RECURRENT_PRESETS["test-recurrent"]


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params):
    network = RecurrentDepthNetwork(config, recurrence=3)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    state = network.initial_state(jax.random.split(jax.random.key(2), (2, 7)))
    return network.logits(params, network.forward_from(params, tokens, positions, state)[0].hidden)


def test_new_layers_pass_on_what_they_get(params):
    copies = 2
    deeper, grown = deepen_core(CONFIG, params, jax.random.key(3), copies)
    assert deeper.core_layers == CONFIG.core_layers * (1 + copies)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, parameter_shapes(deeper))
    # A fresh network's gains are all one, so every layer leaves vectors of norm sqrt(D), and nothing changes.
    np.testing.assert_allclose(logits(deeper, grown), logits(CONFIG, params), atol=2e-5)


def test_gain_of_a_trained_norm_becomes_one_number(params):
    gain = jnp.linspace(0.5, 2.0, CONFIG.width)
    trained = params | {"core_0": params["core_0"] | {"norm_4": gain}}
    _, grown = deepen_core(CONFIG, trained, jax.random.key(3))
    np.testing.assert_allclose(grown["core_1"]["norm_4"], float(jnp.sqrt(jnp.mean(gain**2))), rtol=1e-6)
    assert grown["core_0"] is trained["core_0"] and grown["core_2"] is trained["core_1"]


def test_new_layers_learn(params):
    deeper, grown = deepen_core(CONFIG, params, jax.random.key(3))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(logits(deeper, p)))))(grown)
    assert float(jnp.abs(gradient["core_1"]["attention"]["out"]).max()) > 1e-4
    assert float(jnp.abs(gradient["core_1"]["mlp"]["down"]).max()) > 1e-4


def test_nothing_to_grow_is_refused(params):
    with pytest.raises(ValueError, match="copies must be at least 1, not 0"):
        deepen_core(CONFIG, params, jax.random.key(3), 0)
