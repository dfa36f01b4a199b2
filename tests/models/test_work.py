"""What a call costs, by hand, and an update: three forwards, recurrences without gradient one way,
blocks twice.
"""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from marks import over

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.evaluate.answers import Answers
from paradec_jax.evaluate.fields import work_fields
from paradec_jax.families import PRESETS, network_of, parameter_shapes
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


def products(jaxpr) -> int:
    """Operations of the products of a program, 2 M N K each."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += 2 * inner * eqn.outvars[0].aval.size
        inside = core.jaxprs_in_params(eqn.params)
        total += eqn.params.get("length", 1) * sum(map(products, inside))
    return total


@over(["tiny-causal", "tiny-recurrent", "tiny-sdar", "tiny-mdlm", "test-full", "head"])
def test_counters_are_the_products_of_a_call(name):
    """A window over a full cache, a canvas without one, a head without the scores of its backbone."""
    config = ResidualHeadConfig.of(PRESETS["tiny-sdar"], 2) if name == "head" else PRESETS[name]
    network = network_of(config)
    network = network.at(3) if name == "tiny-recurrent" else network
    canvas, at = name in ("tiny-mdlm", "test-full"), jnp.tile(jnp.arange(64, 72), (2, 1))

    def call(params, tokens):
        prefix = None
        if not canvas:
            cache = network.init_cache(jax.random.split(jax.random.key(0), 2), 64)
            prefix = Prefix(cache, at[:, 0])
        if name != "head":
            return network.logits(params, network.forward(params, tokens, at, prefix).hidden)
        vectors = jnp.zeros((*tokens.shape, config.width))
        return network.forward(params, vectors, at, prefix, hidden=vectors).hidden

    program = jax.make_jaxpr(call)(parameter_shapes(config), jnp.zeros_like(at))
    counted = network.work(2, 8, 0 if canvas else 64).flops
    assert counted == pytest.approx(products(program), rel=0.05)


def test_positions_of_a_row_pass_the_recurrences_of_their_calls():
    """A prompt of 6 at depth 1, then 2 rounds of 4 drafts at depth 1 and 4 verified at 3; or as many
    positions in 2 calls at depth 3.
    """
    network = network_of(PRESETS["test-recurrent"])
    once, deep = (network.at(r).work(1, 1, 10).flops for r in (1, 3))
    decoder = types.SimpleNamespace(network=network, draft_recurrence=1, recurrence=3)
    names = ("network_calls", "positions", "recurrences")
    for whole, flops in (((11, 22, 15), 14 * once + 8 * deep), ((3, 22, 7), 6 * once + 16 * deep)):
        counts, reading = (
            dict(zip(names, np.asarray(of)[:, None], strict=True)) for of in (whole, (1, 6, 1))
        )
        row = work_fields(decoder, Answers([[5] * 8], counts, [0.1], reading), [6])
        assert row["flops_per_token"] == flops / 8
        decoder.draft_recurrence = None


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
