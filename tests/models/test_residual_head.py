"""The residual head: its ways to begin, what it refuses; recorded arrays have its definition."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from marks import over

from paradec_jax.config import ResidualHeadConfig, check_fits
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.families import PRESETS, init_params, network_of, parameter_shapes
from paradec_jax.models.residual_head import INITS, ResidualHeadNetwork, inherited

BACKBONE = PRESETS["test-sdar"]
CONFIG = ResidualHeadConfig.of(BACKBONE, layers=2)
NETWORK = network_of(CONFIG)
BLOCK, WIDTH = CONFIG.block, CONFIG.width


RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(
    lambda s: jnp.asarray(0.3 * RNG.normal(size=s.shape) + 0.1, s.dtype), parameter_shapes(CONFIG)
)


def inputs(length, batch=2, seed=1):
    keys = jax.random.split(jax.random.key(seed))
    return [jax.random.normal(key, (batch, length, WIDTH)) for key in keys]


def positions_of(length, batch=2, start=0):
    return jnp.broadcast_to(start + jnp.arange(length), (batch, length))


@jax.jit
def call(params, vectors, hidden, positions, prefix=None, mask=None):
    return NETWORK.forward(params, vectors, positions, prefix, mask, hidden=hidden)


@pytest.mark.slow
def test_a_head_may_begin_as_the_first_layers_of_its_backbone():
    backbone = init_params(BACKBONE, jax.random.key(1))
    params = inherited(CONFIG, jax.random.key(0), backbone)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, parameter_shapes(CONFIG))
    for layer in ("layer_0", "layer_1"):
        chex.assert_trees_all_equal(params[layer], backbone[layer])
    assert not call(params, *inputs(BLOCK), positions_of(BLOCK)).hidden.any()
    size = np.sqrt(np.mean(np.square(backbone["embedding"])))
    np.testing.assert_allclose(params["embedding_norm"], np.full(WIDTH, size), rtol=1e-5)
    np.testing.assert_array_equal(params["fusion"][:WIDTH], np.eye(WIDTH))
    absent = {name: leaf for name, leaf in backbone.items() if name != "layer_1"}
    with pytest.raises(
        ValueError, match=r"init inherited needs a backbone with layer_1 for 2 layers"
    ):
        inherited(CONFIG, jax.random.key(0), absent)


@over(INITS, argument="init")
def test_ways_to_begin(init):
    params = ResidualHeadNetwork.init_params(CONFIG, jax.random.key(0), init)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, parameter_shapes(CONFIG))
    residual = call(params, *inputs(BLOCK), positions_of(BLOCK)).hidden
    leaves = flatten_dict(params, sep="/")
    gains = {path: leaf for path, leaf in leaves.items() if path.endswith("norm")}
    if init == "normal_0.2":
        every = np.concatenate([np.ravel(leaf) for leaf in leaves.values()])
        assert abs(every.std() - 0.2) < 0.01 and abs(every.mean()) < 0.01
        assert 0.1 < np.sqrt(np.mean(np.square(residual))) < 0.35
        return
    zero = {path for path, gain in gains.items() if not gain.any()}
    assert zero == ({"final_norm"} if init == "zero_gain" else set())
    assert all((gain == 1).all() for path, gain in gains.items() if path not in zero)
    size = np.sqrt(np.mean(np.square(residual)))
    assert size == 0 if init == "zero_gain" else abs(size - 1) < 0.01


def test_the_default_begins_at_zero():
    zero = ResidualHeadNetwork.init_params(CONFIG, jax.random.key(3), "zero_gain")
    chex.assert_trees_all_equal(init_params(CONFIG, jax.random.key(3)), zero)
    with pytest.raises(
        ValueError, match=r"init must be one of normal_0\.2, ordinary, zero_gain, not 'zeros'"
    ):
        ResidualHeadNetwork.init_params(CONFIG, jax.random.key(0), "zeros")


def test_it_is_a_network_without_a_vocabulary():
    assert isinstance(NETWORK, CachedNetwork)
    assert (NETWORK.visibility, NETWORK.block, NETWORK.max_length) == (
        "block",
        BLOCK,
        BACKBONE.max_length,
    )
    assert NETWORK.vocab_size == 0


def test_a_head_of_another_backbone():
    check_fits(dataclasses.replace(CONFIG, layers=5, feed_forward=7), BACKBONE)
    for changes, message in (
        (
            {"width": 2 * WIDTH},
            "the residual head has width 32, but the backbone has 16: it is another's",
        ),
        ({"block": 2}, "the residual head has block 2, but the backbone has 4: it is another's"),
    ):
        with pytest.raises(ValueError, match=message):
            check_fits(dataclasses.replace(CONFIG, **changes), BACKBONE)
    for refused in (PRESETS["test-causal"], PRESETS["test-mdlm"]):
        with pytest.raises(
            ValueError, match=f"writes blocks, but one of family {refused.family} does not"
        ):
            check_fits(CONFIG, refused)


def test_a_head_of_another_width_is_refused_before_it_runs():
    positions = jnp.arange(2)[None]
    for width in (WIDTH - 1, 2 * WIDTH):
        vectors = jnp.zeros((1, 2, width))
        with pytest.raises(
            ValueError, match=f"vectors of width {WIDTH}, not of {width}: it is another network's"
        ):
            jax.eval_shape(lambda v: NETWORK.forward(PARAMS, v, positions, hidden=v), vectors)
