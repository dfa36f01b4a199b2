"""Numbers that a config cannot have."""

import dataclasses

import pytest

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.families import PRESETS

HEAD = ResidualHeadConfig.of(PRESETS["test-sdar"])
CONFIGS = {name: PRESETS[name] for name in ("test-recurrent", "test-causal", "test-sdar", "test-mdlm")} | {
    "head": HEAD
}
SCALED = [name for name in CONFIGS if name != "test-mdlm"]  # it has neither scale as a field


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("field", ["rope_base", "norm_eps"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300, 10**400])
def test_scales_are_positive(name, field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive number of float32"):
        dataclasses.replace(CONFIGS[name], **{field: value})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "width must be at least 1, not 0"),
        (2**31, "width must be at most 2147483647, not 2147483648"),
        (1.5, "width must be a whole number, not 1.5"),
        ("16", "width must be a whole number, not '16'"),
        (True, "width must be a whole number, not True"),
    ],
)
def test_sizes_are_of_32_bits(name, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS[name], width=value)


def test_recurrences_have_an_end():
    with pytest.raises(ValueError, match="mean_recurrence must be at most 4096"):
        dataclasses.replace(PRESETS["test-recurrent"], mean_recurrence=10**9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ntk"}, "kind must be one of linear, dynamic, llama3, yarn, not 'ntk'"),
        ({"beta_fast": 4.0}, "beta_fast must be None where rotary positions are scaled as linear"),
        ({"kind": "llama3"}, "low_freq_factor must be below high_freq_factor"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"sliding_window": 6, "sliding_layers": (False,)}, "sliding_layers says .* have the window 6"),
        ({"sliding_layers": (True, False)}, "sliding_layers says .* have the window None"),
    ],
)
def test_scalings_and_windows_that_cannot_be(fields, message):
    if "sliding" not in message:
        fields = {"rope_scaling": {"kind": "linear", "factor": 2.0, "original": 8, **fields}}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["test-causal"], **fields)
