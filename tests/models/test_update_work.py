"""Operations of an update: three forwards; recurrences without gradient go one way, blocks twice; those of a head."""

import jax
import jax.numpy as jnp
import pytest

from experiments.systems.products import products
from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.families import PRESETS, network_of, parameter_shapes
from paradec_jax.losses import ResidualRules, residual_loss
from paradec_jax.models import ResidualHeadNetwork, batch_flops, head_flops, update_flops

ROWS, LENGTH = 3, 40
SHAPES = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)}


@pytest.mark.parametrize("name", ["test-causal", "test-mdlm"])
def test_a_pass_goes_forward_and_twice_back(name):
    network = network_of(PRESETS[name])
    forward = network.work(ROWS, LENGTH, 0).flops
    assert update_flops(network, ROWS, LENGTH) == 3 * forward
    assert batch_flops(network)(SHAPES, {"loss": 1.0}) == 3 * forward


def test_blocks_are_read_clean_and_noisy():
    network = network_of(PRESETS["test-sdar"])
    clean, noisy = (network.work(ROWS, LENGTH, context).flops for context in (0, LENGTH))
    assert update_flops(network, ROWS, LENGTH) == 3 * (clean + noisy) > 6 * clean


def test_only_the_last_recurrences_go_back():
    network = network_of(PRESETS["test-recurrent"])
    of = {n: network.at(n).work(ROWS, LENGTH, 0).flops for n in (1, 2, 3, 7)}
    assert update_flops(network, ROWS, LENGTH, 7, 3) == of[7] + 2 * of[3]
    assert update_flops(network, ROWS, LENGTH, 2, 3) == 3 * of[2]
    mean = sum(update_flops(network, ROWS, LENGTH, r, 1) for r in (1, 2, 7)) / 3
    assert update_flops(network, ROWS, LENGTH, 10 / 3, 1) == pytest.approx(mean)
    c = network.config
    drawn = update_flops(network, ROWS, LENGTH, c.mean_recurrence + 1, c.mean_backprop_depth)
    assert update_flops(network, ROWS, LENGTH) == drawn
    assert batch_flops(network, 3)(SHAPES, {"recurrence": 7.0}) == of[7] + 2 * of[3]


@pytest.mark.parametrize(("steps", "layout"), [(1, "doubled"), (3, "doubled"), (2, "infer_matched")])
def test_a_head_costs_what_its_traced_update_does(steps, layout):
    """Beside the scores of no head, which are logged alone; gradients that nothing asks for are counted as well."""
    backbone = network_of(PRESETS["test-sdar"])
    head = ResidualHeadNetwork(ResidualHeadConfig.of(backbone.config, 2))
    spec = TokenSpec(mask=backbone.vocab_size - 1, alignment="own")
    loss = residual_loss(backbone, head, spec, ResidualRules(steps, layout=layout), chunk=None)
    kinds = {"tokens": jnp.int32, "labelled": jnp.bool_, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for name, kind in kinds.items()}
    step = jax.value_and_grad(lambda *given: loss(*given, jax.random.key(0))[0])
    traced = jax.make_jaxpr(step)(parameter_shapes(head.config), parameter_shapes(backbone.config), batch)
    logged = 2 * steps * ROWS * LENGTH * backbone.vocab_size * backbone.config.width
    done = products(traced) - logged
    assert head_flops(backbone, head, steps, layout)(SHAPES, {}) == pytest.approx(done, rel=0.12)
