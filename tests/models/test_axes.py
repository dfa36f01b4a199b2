"""The table of logical axes: complete, of the right ranks and lengths, and and what costs read in
it.
"""

import dataclasses

import jax
import pytest
from flax.traverse_util import flatten_dict
from marks import over

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.families import PRESETS, family_of, network_of, parameter_shapes
from paradec_jax.sharding.axes import axes_of, sizes

MORE = {
    "every bias and norm": dataclasses.replace(
        PRESETS["test-causal"], qk_norm=True, tie_embeddings=False
    ),
    "every bias": dataclasses.replace(PRESETS["test-causal"], out_bias=True, mlp_bias=True),
    "llama": dataclasses.replace(PRESETS["test-causal"], qkv_bias=False, kv_heads=4),
    "recurrent, untied": dataclasses.replace(
        PRESETS["test-recurrent"], tie_embeddings=False, qk_bias=False
    ),
}
BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
CONFIGS = PRESETS | MORE | {"sdar with biases": dataclasses.replace(PRESETS["test-sdar"], **BIASES)}
HEADS = {
    f"head of {name}": ResidualHeadConfig.of(CONFIGS[name])
    for name in ("test-sdar", "sdar with biases")
}


def lengths(config) -> dict[str, int]:
    return {
        "vocab": getattr(config, "vocab_size", None),
        "embed": config.width,
        "embed_pair": 2 * config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.feed_forward,
        "conditioning": getattr(config, "conditioning", None),
        "noise_features": 256,
        "six_vectors": 6,
        "two_vectors": 2,
    }


@over(CONFIGS | HEADS)
def test_every_parameter_has_its_axes(name):
    config = (CONFIGS | HEADS)[name]
    shapes = parameter_shapes(config)
    for path, leaf in flatten_dict(shapes, sep="/").items():
        row = axes_of(network_of(config).table, path)
        assert leaf.shape == tuple(lengths(config)[axis] for axis in row.names), path
        assert set(row.inputs + row.outputs) <= set(row.names) and bool(row.inputs) == bool(
            row.outputs
        )


def test_no_entry_is_idle():
    used: dict[int, set[int]] = {}
    tables = {
        id(network_of(config).table): network_of(config).table
        for config in (CONFIGS | HEADS).values()
    }
    for config in (CONFIGS | HEADS).values():
        table = network_of(config).table
        paths = flatten_dict(parameter_shapes(config), sep="/")
        used.setdefault(id(table), set()).update(id(axes_of(table, path)) for path in paths)
    assert len(tables) == 4
    assert all(used[key] == {id(row) for row in table.values()} for key, table in tables.items())


@over(["layer_0/attention/w", "layer_0/attention/qkv"], argument="path")
def test_parameters_that_are_in_no_table(path):
    with pytest.raises(ValueError, match=f"{path} has 0 entries"):
        axes_of(network_of(PRESETS["test-causal"]).table, path)


@over(CONFIGS)
def test_sizes_count_each_parameter_that_a_call_reads(name):
    config = CONFIGS[name]
    shapes = parameter_shapes(config)
    every = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    tables = (
        config.vocab_size * config.width * (1 if getattr(config, "tie_embeddings", False) else 2)
    )
    tables += config.vocab_size * (config.family == "masked_diffusion")  # the head's bias
    assert sum(sizes(family_of(config).network.table, shapes).values()) == every - tables
