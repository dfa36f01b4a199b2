"""The recurrent network: what is refused, initial states, scaled rotations, its output matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from stubs import tiny_network, tiny_params

from paradec_jax.config import RECURRENT_PRESETS, RopeScaling
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.nn.rope import rotation

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def forward(network, params, tokens, state, r: int = 3):
    @jax.jit
    def call(params, tokens, positions, state):
        out, latent = network.at(r).forward_from(params, tokens, positions, state)
        return network.logits(params, out.hidden), latent

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return call(params, tokens, positions, state)


TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
STATE = normal(2, 5, RECURRENT_PRESETS["test-recurrent"].width)


@over(
    [({"cache": "ring"}, "cache"), ({"recurrence": -1}, "recurrence")], argument="options, message"
)
def test_impossible_networks(options, message):
    with pytest.raises(ValueError, match=message):
        RecurrentDepthNetwork(RECURRENT_PRESETS["test-recurrent"], **options)


@over([16, 32], argument="width")
def test_initial_states_do_not_depend_on_the_width(width):
    keys = jax.random.split(jax.random.key(0), (8, 64))
    states = tiny_network(width=width).initial_state(keys, 0.5)
    assert float(jnp.std(states)) == pytest.approx(0.5 * 0.6240, rel=0.03)
    assert 0.85 < float(jnp.max(jnp.abs(states))) <= 0.5 * 1.898
    assert not tiny_network(width=width).initial_state(keys, 0.0).any()


# Frequencies that transformers 5.24 scales for 16 channels, base 100, factor 4, original length 4,
# a text of 8.
FREQUENCIES = {
    "linear": ({}, [0.25, 0.14059, 0.079057, 0.044457, 0.025, 0.014059, 0.0079057, 0.0044457]),
    "dynamic": ({}, [1.0, 0.44683, 0.19966, 0.089216, 0.039865, 0.017813, 0.0079594, 0.0035566]),
    "llama3": (
        {"low_freq_factor": 0.03, "high_freq_factor": 0.3},
        [1.0, 0.56234, 0.22954, 0.085559, 0.034351, 0.014964, 0.0079057, 0.0044457],
    ),
    "yarn": ({}, [1.0, 0.14059, 0.079057, 0.044457, 0.025, 0.014059, 0.0079057, 0.0044457]),
    "yarn, not rounded": (
        {"beta_fast": 0.2, "beta_slow": 0.05, "truncate": False, "attention_factor": 1.5},
        [1.0, 0.56234, 0.31623, 0.12308, 0.038069, 0.014059, 0.0079057, 0.0044457],
    ),
    "yarn, slow": (
        {"beta_fast": 0.3, "beta_slow": 0.03},
        [1.0, 0.56234, 0.26879, 0.12448, 0.055, 0.022494, 0.0079057, 0.0044457],
    ),
}


@over(FREQUENCIES)
def test_scaled_frequencies_are_those_of_transformers(name):
    numbers, want = FREQUENCIES[name]
    scaling = RopeScaling(kind=name.split(",")[0], factor=4.0, original=4, **numbers)
    length = numbers.get("attention_factor", 1.138629436 if "yarn" in name else 1.0)
    cos, sin = (x[0, 0, 0] for x in rotation(jnp.array([[7]]), 16, 100.0, scaling))
    np.testing.assert_allclose(cos + 1j * sin, length * np.exp(7j * np.array(want)), atol=1e-4)


@pytest.mark.slow
def test_a_separate_output_matrix_is_used():
    network = tiny_network(tie_embeddings=False)
    params = tiny_params(tie_embeddings=False)
    tied = {name: leaf for name, leaf in params.items() if name != "head"}
    logits, _ = forward(network, params, TOKENS, STATE)
    doubled, _ = forward(network, {**params, "head": 2 * params["head"]}, TOKENS, STATE)
    np.testing.assert_allclose(doubled, 2 * logits, rtol=1e-6)
    same, _ = forward(network, {**params, "head": params["embedding"].T}, TOKENS, STATE)
    want, _ = forward(tiny_network(), tied, TOKENS, STATE)
    np.testing.assert_allclose(same, want, atol=1e-6)
