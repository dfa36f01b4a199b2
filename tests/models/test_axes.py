"""The table of logical axes: complete, of the right ranks and lengths, and what optimizers and costs read in it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.families import (
    FAMILIES,
    PRESETS,
    family_of,
    logical_axes,
    network_of,
    parameter_shapes,
)
from paradec_jax.sharding.axes import axes_of, sizes

MORE = {
    "every bias and norm": dataclasses.replace(PRESETS["test-causal"], qk_norm=True, tie_embeddings=False),
    "llama": dataclasses.replace(PRESETS["test-causal"], qkv_bias=False, kv_heads=4),
    "recurrent, untied": dataclasses.replace(PRESETS["test-recurrent"], tie_embeddings=False, qk_bias=False),
}
CONFIGS = PRESETS | MORE | {"sdar with biases": dataclasses.replace(PRESETS["test-sdar"], qkv_bias=True)}


def lengths(config) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "embed": config.width,
        "embed_pair": 2 * config.width,
        "heads": config.heads,
        "kv_heads": getattr(config, "kv_heads", config.heads),
        "head_dim": config.head_dim,
        "mlp": config.feed_forward,
        "conditioning": getattr(config, "conditioning", None),
        "noise_features": 256,
        "six_vectors": 6,
        "two_vectors": 2,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_its_axes(name):
    config = CONFIGS[name]
    shapes = parameter_shapes(config)
    axes = flatten_dict(logical_axes(config, shapes), sep="/")
    for path, leaf in flatten_dict(shapes, sep="/").items():
        assert leaf.shape == tuple(lengths(config)[axis] for axis in axes[path]), path
        row = axes_of(family_of(config).network.table, path)
        assert set(row.inputs + row.outputs) <= set(row.names) and bool(row.inputs) == bool(row.outputs)


def test_no_entry_is_idle():
    for family in FAMILIES.values():
        rules = family.network.table
        used = {
            id(axes_of(rules, path))
            for config in CONFIGS.values()
            if family_of(config) is family
            for path in flatten_dict(parameter_shapes(config), sep="/")
        }
        assert used == {id(row) for row in rules.values()}


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        ("layer_0/attention/w", (2, 2), "attention/w has 0 entries"),
        ("layer_0/attention/q", (2, 2), r"attention/q has shape \(2, 2\), but axes embed, heads, head_dim"),
        ("layer_0/attention/qkv", (2, 2), "attention/qkv has 0 entries"),
    ],
)
def test_parameters_that_are_in_no_table(path, shape, message):
    params = unflatten_dict({path: jax.ShapeDtypeStruct(shape, jnp.float32)}, sep="/")
    with pytest.raises(ValueError, match=message):
        logical_axes(PRESETS["test-causal"], params)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_count_each_parameter_that_a_call_reads(name):
    config = CONFIGS[name]
    shapes = parameter_shapes(config)
    every = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    tables = config.vocab_size * config.width * (1 if getattr(config, "tie_embeddings", False) else 2)
    tables += config.vocab_size * (config.family == "masked_diffusion")  # the head's bias
    assert sum(sizes(family_of(config).network.table, shapes).values()) == every - tables


def test_work_of_a_call():
    """Weights read and multiplied by one call, by hand."""
    c = PRESETS["tiny-recurrent"]
    block = 4 * c.width**2 + 2 * c.width + 3 * c.width * c.feed_forward + 4 * c.width
    once, again = 2 * block + c.width + c.vocab_size * c.width, 2 * block + 2 * c.width**2
    assert network_of(c).at(3).work(1, 1, 0).bytes == 4 * (once + 3 * again)
    c = PRESETS["tiny-causal"]
    block = 4 * c.width**2 + 2 * c.head_dim + 3 * c.width * c.feed_forward + 2 * c.width
    assert network_of(c).work(1, 1, 0).bytes == 4 * (c.layers * block + c.width + c.vocab_size * c.width)


def test_work_grows_with_recurrences_context_and_rows():
    config = PRESETS["test-recurrent"]

    def work(batch, positions, context, recurrence):
        return network_of(config).at(recurrence).work(batch, positions, context)

    base, more = work(1, 1, 10, 2), work(1, 1, 10, 4)
    core = (more.bytes - base.bytes) // 2
    assert work(1, 1, 10, 6).bytes - more.bytes == 2 * core
    cached = 2 * (1 + 1 + 2 * 2) * config.width * 4
    assert work(1, 1, 11, 2).bytes - base.bytes == cached
    assert work(3, 1, 10, 2).bytes - base.bytes == 2 * 10 * cached
    assert work(3, 1, 10, 2).flops == 3 * base.flops
    assert work(1, 4, 10, 2).bytes == base.bytes
