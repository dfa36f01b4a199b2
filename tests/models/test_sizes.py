"""Configs and networks of every family: numbers of parameters, initial values, impossible numbers,
equality.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from marks import over

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.families import PRESETS, init_params, network_of, parameter_shapes

HEAD = ResidualHeadConfig.of(PRESETS["test-sdar"], layers=2)
# Of the larger two of SDAR the published sizes of their files, two bytes a number.
PUBLISHED = {
    "huginn-0125": 3_564_976_800,
    "qwen2.5-coder-0.5b": 494_032_768,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen2.5-coder-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "smollm2-135m": 134_515_008,
    "sdar-1.7b": 2_031_739_904,
    "sdar-4b": 8_822_848_512 // 2,
    "sdar-8b": 16_381_470_720 // 2,
    "llada-8b": 8_015_581_184,
    "dream-7b": 7_615_616_512,
    "qwen3-0.6b-diffusion": 596_049_920,
    "open-dcoder-0.5b": 494_032_768,
    "mdlm-tiny": 80_061_266,
    "mdlm-small": 169_627_218,
    "mdlm-medium": 424_477_010,
    "mdlm-large": 863_158_098,
    "mdlm-1.3b": 1_452_834_130,
    "mdlm-3b": 3_316_461_906,
    "mdlm-8b": 8_593_896_786,
}


def count(config) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameter_shapes(config)))


@over(PUBLISHED)
def test_releases_have_their_published_numbers_of_parameters(name):
    assert count(PRESETS[name]) == PUBLISHED[name]


@over([("sdar-1.7b", 159), ("sdar-4b", 316), ("sdar-8b", 612)], argument="preset, millions")
def test_sizes_of_the_released_heads(preset, millions):
    assert round(count(ResidualHeadConfig.of(PRESETS[preset], layers=3)) / 1e6) == millions


@over(["causal", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_initial_values(name):
    depth = {"layers": 3} if name == "causal" else {}
    config = dataclasses.replace(
        PRESETS[f"test-{name}"], width=64, vocab_size=256, feed_forward=96, **depth
    )
    params = init_params(config, jax.random.key(1))
    first = params["layer_0" if name == "causal" else "core_0"]
    layers = 3 if name == "causal" else config.effective_depth
    other = first["attention"]["q"] if name == "causal" else params["adapter"]
    cut = 0.986578  # standard deviation of a normal cut at three, relative to the one before
    for leaf, std in (
        (params["embedding"], config.init_std),
        (other, config.init_std),
        (first["mlp"]["down"], config.init_std / math.sqrt(2 * layers)),
    ):
        assert float(jnp.std(leaf)) == pytest.approx(cut * std, rel=0.05)
        assert float(jnp.max(jnp.abs(leaf))) <= 3 * std
    assert (first["mlp_norm" if name == "causal" else "norm_1"] == 1).all()
    assert (first["attention"]["q_bias"] == 0).all()


@over(PRESETS)
def test_networks_are_equal_by_their_config(name):
    config = PRESETS[name]
    network = network_of(config)
    again = network_of(dataclasses.replace(config))
    assert network == again and hash(network) == hash(again)
    assert network != network_of(dataclasses.replace(config, max_length=config.max_length + 1))
    assert network.vocab_size == config.vocab_size
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parameter_shapes(config))} == {
        config.param_dtype
    }


CONFIGS = {name: PRESETS[f"test-{name}"] for name in ("recurrent", "causal", "sdar", "mdlm")} | {
    "head": HEAD
}


@over(
    [
        ("recurrent", {"heads": 3}, "3 heads"),
        ("recurrent", {"remat": "all"}, "remat"),
        ("recurrent", {"heads": 16}, "even"),
        (
            "causal",
            {"attention": "flash"},
            "attention must be one of dense, .*, splash, not 'flash'",
        ),
        ("causal", {"layers": 0}, "layers must be at least 1"),
        ("causal", {"kv_heads": 3}, "heads 4 must be a multiple of kv_heads 3"),
        ("causal", {"width": 18}, "width 18 does not split into 4 heads"),
        ("causal", {"head_channels": 5}, "even number of channels, not 5"),
        (
            "causal",
            {"remat": "iteration"},
            "remat must be one of none, .*, offload, not 'iteration'",
        ),
        ("sdar", {"block": 0}, "block must be at least 1, not 0"),
        ("sdar", {"block": 129}, "block must be between 1 and max_length 128, not 129"),
        ("mdlm", {"vocab_size": 1}, "vocab_size must be at least 2, the mask and a token, not 1"),
        ("mdlm", {"heads": 3}, "width 16 does not split into 3 heads"),
        ("mdlm", {"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ("head", {"layers": 0}, "layers of a residual head must be 1 to 8, not 0"),
        ("head", {"layers": 9}, "layers of a residual head must be 1 to 8, not 9"),
        ("head", {"block": 0}, "block must be at least 1"),
        ("head", {"width": 18}, "18 does not split into 4 heads"),
    ],
    argument="name, changes, message",
)
def test_impossible_shapes(name, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[name], **changes)


SCALED = [name for name in CONFIGS if name != "mdlm"]  # it has neither scale as a field


@over(SCALED)
@over(["rope_base", "norm_eps"], argument="field")
@over([0, 0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300, 10**400], argument="value")
def test_scales_are_positive(name, field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive number of float32"):
        dataclasses.replace(CONFIGS[name], **{field: value})


@over(CONFIGS)
@over(
    [
        (0, "width must be at least 1, not 0"),
        (2**31, "width must be at most 2147483647, not 2147483648"),
        (1.5, "width must be a whole number, not 1.5"),
        ("16", "width must be a whole number, not '16'"),
        (True, "width must be a whole number, not True"),
    ],
    argument="value, message",
)
def test_sizes_are_of_32_bits(name, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[name], width=value)


def test_recurrences_have_an_end():
    with pytest.raises(ValueError, match="mean_recurrence must be at most 4096"):
        dataclasses.replace(CONFIGS["recurrent"], mean_recurrence=10**9)


@over(
    [
        ({"kind": "ntk"}, "kind must be one of linear, dynamic, llama3, yarn, not 'ntk'"),
        ({"beta_fast": 4.0}, "beta_fast must be None where rotary positions are scaled as linear"),
        ({"kind": "llama3"}, "low_freq_factor must be below high_freq_factor"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        (
            {"sliding_window": 6, "sliding_layers": (False,)},
            "sliding_layers says .* have the window 6",
        ),
        ({"sliding_layers": (True, False)}, "sliding_layers says .* have the window None"),
    ],
    argument="fields, message",
)
def test_scalings_and_windows_that_cannot_be(fields, message):
    if "sliding" not in message:
        fields = {"rope_scaling": {"kind": "linear", "factor": 2.0, "original": 8, **fields}}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["test-causal"], **fields)
