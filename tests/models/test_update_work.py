"""Operations of an update: three forwards, of which recurrences without gradient go one way and blocks twice."""

import jax
import jax.numpy as jnp
import pytest

from paradec_jax.families import PRESETS, network_of
from paradec_jax.models import batch_flops, update_flops

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
