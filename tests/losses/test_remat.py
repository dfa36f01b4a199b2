"""Rematerialisation and truncation of the recurrent losses, as the config says or a loss is told."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from objectives import OBJECTIVES, RULES, SPEC, three
from stubs import tiny_network, tiny_params

from paradec_jax import losses

LOSSES = {
    "recurrent": losses.recurrent_loss,
    "stepwise": losses.stepwise_loss,
    "recurrent consistency": lambda network, draw, depth, **options: losses.recurrent_consistency_loss(
        network, draw, depth, SPEC, RULES, **options
    ),
}


@functools.cache
def gradient(name, depth=None, told=None, remat="none", mean_backprop_depth=2):
    """Gradients of a loss, and whether its program holds a rematerialised region."""
    network = tiny_network(remat=remat, mean_backprop_depth=mean_backprop_depth)
    loss, params = LOSSES[name](network, three, depth, remat=told), tiny_params()
    batch = OBJECTIVES[name].batch(1) | {"step": jnp.int32(0)}
    found = jax.jit(jax.grad(lambda p: loss(p, p, batch, jax.random.key(3))[0]))
    return found(params), "prevent_cse" in str(jax.make_jaxpr(found)(params))


# All three read the config by one function, so one of them is quick.
EACH = pytest.mark.parametrize(
    "name", ["recurrent", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LOSSES)[1:])]
)


@EACH
def test_remat_is_read_from_the_config(name):
    (plain, kept), (again, remade) = gradient(name), gradient(name, remat="iteration")
    assert remade and not kept
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-6)
    assert not gradient(name, told=False, remat="iteration")[1]


@EACH
def test_the_depth_is_read_from_the_config(name):
    chex.assert_trees_all_equal(gradient(name)[0], gradient(name, depth=2, mean_backprop_depth=1)[0])
    with pytest.raises(ValueError, match="backprop_depth must be at least 1, not 0"):
        LOSSES[name](tiny_network(), three, 0)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(gradient(name)[0], gradient(name, mean_backprop_depth=1)[0], rtol=1e-2)
