"""What a call costs, by hand, and an update: three forwards, recurrences without gradient one way,
blocks twice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from marks import over

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.families import PRESETS, network_of
from paradec_jax.models import batch_flops, update_flops

ROWS, LENGTH = 3, 40
SHAPES = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)}


def weights_of(config) -> int:
    """Weights that a position meets at 3 recurrences, if any, and an output matrix."""
    d = config.width
    if config.family == "masked_diffusion":  # modulations are constants of the weights
        return config.layers * 12 * d**2 + config.vocab_size * d
    block = 2 * d * config.head_dim * (config.heads + config.kv_heads) + 3 * d * config.feed_forward
    if config.family == "recurrent_depth":
        sandwich = block + 2 * d + 4 * d  # biases of queries and keys, norms
        layers = config.prelude_layers + config.coda_layers + 3 * config.core_layers
        return layers * sandwich + 3 * 2 * d**2 + d + config.vocab_size * d
    layers = config.layers * (block + 2 * config.head_dim * config.qk_norm + 2 * d)
    return layers + (
        2 * d**2 + 3 * d if config.family == "residual_head" else d + config.vocab_size * d
    )


@over(["tiny-recurrent", "tiny-causal", "tiny-mdlm", "head"])
def test_work_of_a_call(name):
    config = ResidualHeadConfig.of(PRESETS["tiny-sdar"], 2) if name == "head" else PRESETS[name]
    network, weights = network_of(config), weights_of(config)
    network = network.at(3) if name == "tiny-recurrent" else network
    layers = getattr(config, "layers", 1 + 3 * 2 + 1)  # prelude, core three times, coda
    context = 0 if name == "tiny-mdlm" else 10
    work = network.work(3, 8, context)
    cached = 2 * layers * config.kv_heads * config.head_dim * 3 * context
    assert work.bytes == 4 * (weights + cached)
    assert work.flops == 24 * (
        2 * weights + 4 * layers * config.heads * config.head_dim * (context + 8)
    )
    assert (
        network.work(3, 8, context, 0).flops == work.flops - 48 * network.vocab_size * config.width
    )


def test_a_sliding_window_bounds_what_a_layer_reads():
    window = {"sliding_window": 6, "sliding_layers": (True, False, False)}
    far, near = (dataclasses.replace(PRESETS["tiny-causal"], **fields) for fields in ({}, window))
    far, near = (network_of(config).work(3, 8, 10) for config in (far, near))
    assert far.bytes - near.bytes == 2 * 4 * (2 * 128 * 3) * (10 - 5)  # of two layers in six
    assert far.flops - near.flops == 2 * 24 * 4 * 128 * (18 - 6)


def test_a_denoiser_has_no_context():
    with pytest.raises(ValueError, match="no context of 5 positions"):
        network_of(PRESETS["test-mdlm"]).work(1, 1, 5)


def test_full_attention_costs_what_a_causal_model_of_its_shape_does():
    full, causal = (
        network_of(PRESETS[name]).work(2, 4, 16) for name in ("test-full", "test-causal")
    )
    assert full == causal


@over(["test-causal", "test-mdlm"])
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
