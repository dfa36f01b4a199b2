"""Rematerialisation and truncation of the recurrent losses, as the config says or a loss is told."""

import chex
import jax
import jax.numpy as jnp
import pytest
from loss_table import OBJECTIVES, RULES, SPEC, three
from marks import over, slow
from stubs import tiny_network, tiny_params

from experiments.recurrent_depth.recurrent_consistency import recurrent_consistency_loss
from experiments.recurrent_depth.stepwise import stepwise_loss
from paradec_jax import losses


# All three read the config by one function, so one of them is quick.
@over(
    [
        ("recurrent", losses.recurrent_loss, ()),
        slow("stepwise", stepwise_loss, ()),
        slow("recurrent consistency", recurrent_consistency_loss, (SPEC, RULES)),
    ],
    argument="name, loss, more",
)
@pytest.mark.slow
def test_remat_and_depth_are_read_from_the_config(name, loss, more):
    batch = OBJECTIVES[name].batch(1) | {"step": jnp.int32(0)}

    def gradient(depth=None, given=None, **config):
        """Gradients, and whether the program holds a rematerialised region."""
        network = tiny_network(**{"remat": "none", "mean_backprop_depth": 2} | config)
        made = loss(network, three, depth, *more, remat=given)
        found = jax.jit(jax.grad(lambda p: made(p, p, batch, jax.random.key(3))[0]))
        return found(tiny_params()), "prevent_cse" in str(jax.make_jaxpr(found)(tiny_params()))

    (plain, kept), (again, remade) = gradient(), gradient(remat="iteration")
    assert remade and not kept and not gradient(given=False, remat="iteration")[1]
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(plain, gradient(depth=2, mean_backprop_depth=1)[0])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(plain, gradient(mean_backprop_depth=1)[0], rtol=1e-2)
    with pytest.raises(ValueError, match="backprop_depth must be at least 1, not 0"):
        loss(tiny_network(), three, 0, *more)
