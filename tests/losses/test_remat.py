"""Rematerialisation and truncation of the recurrent losses, as the config says or a loss is told."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from stubs import tiny_network, tiny_params

from paradec_jax.config import TokenSpec
from paradec_jax.losses import recurrent_consistency_loss, recurrent_loss, stepwise_loss
from paradec_jax.losses.consistency import ConsistencyRules

SPEC = TokenSpec(bos=1, stop=(2,), pad=0)
RULES = ConsistencyRules(context="clean", after_eos="keep", ar_weight=2.0)
TOKENS = jnp.asarray([[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]])
BATCHES = {
    "next token": {"tokens": TOKENS, "targets": TOKENS, "weights": jnp.ones((2, 5)), "step": jnp.int32(0)},
    "consistency": {
        "prompt": TOKENS[:, :4],
        "prompt_lengths": jnp.array([4, 4]),
        "noisy": jnp.array([[[13, 30, 29]], [[28, 17, 18]]]),
        "clean": jnp.array([[[13, 14, 15]], [[16, 17, 18]]]),
        "pairs": jnp.array([1, 1]),
        "step": jnp.int32(0),
    },
    "stepwise": {
        "tokens": TOKENS,
        "targets": jnp.arange(2 * 3 * 2).reshape(2, 3, 2),
        "recurrences": jnp.int32(3),
        "prompt_targets": TOKENS[:, :3],
        "prompt_weights": jnp.ones((2, 3)),
        "step": jnp.int32(0),
    },
}


def loss_of(name, network, depth, **options):
    def draw(key, step):
        return jnp.int32(3)

    if name == "next token":
        return recurrent_loss(network, draw, depth, **options)
    if name == "stepwise":
        return stepwise_loss(network, draw, depth, **options)
    return recurrent_consistency_loss(network, draw, depth, SPEC, RULES, **options)


@functools.cache
def gradient(name, depth=None, told=None, remat="none", mean_backprop_depth=2):
    """Gradients of a loss, and whether its program holds a rematerialised region."""
    network = tiny_network(remat=remat, mean_backprop_depth=mean_backprop_depth)
    loss, params, batch = loss_of(name, network, depth, remat=told), tiny_params(), BATCHES[name]
    found = jax.jit(jax.grad(lambda p: loss(p, p, batch, jax.random.key(3))[0]))
    return found(params), "prevent_cse" in str(jax.make_jaxpr(found)(params))


@pytest.mark.parametrize("name", BATCHES)
def test_remat_is_read_from_the_config(name):
    (plain, kept), (again, remade) = gradient(name), gradient(name, remat="iteration")
    assert remade and not kept
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-6)
    assert not gradient(name, told=False, remat="iteration")[1]


@pytest.mark.parametrize("name", BATCHES)
def test_the_depth_is_read_from_the_config(name):
    chex.assert_trees_all_equal(gradient(name)[0], gradient(name, depth=2, mean_backprop_depth=1)[0])
    with pytest.raises(ValueError, match="backprop_depth must be at least 1, not 0"):
        loss_of(name, tiny_network(), 0)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(gradient(name)[0], gradient(name, mean_backprop_depth=1)[0], rtol=1e-2)
