"""Where arrays lie on a mesh: rules, fallbacks, states of optimizers, what is refused. No devices
are needed.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from marks import over
from stubs import tiny_drafter, tiny_drafter_params, tiny_head
from stubs.tiny import ones

import paradec_jax as pd
from paradec_jax.families import (
    FAMILIES,
    PRESETS,
    matrix_axes,
    network_of,
    parameter_shapes,
)
from paradec_jax.sharding.layout import layout, shardings, shardings_like
from paradec_jax.sharding.mesh import AXES, row_shardings
from paradec_jax.sharding.rules import assign, row_axes
from paradec_jax.train import TrainState, adamw, muon

TINY = [name for name in PRESETS if name.startswith("test-")]
MESH = AbstractMesh((1, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


def specs(tree, mesh=MESH):
    found = shardings(tree, mesh)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(found)
    }


def test_every_family_has_a_tiny_preset_here():
    assert {type(PRESETS[name]) for name in TINY} == {family.config for family in FAMILIES.values()}


@over([*TINY, "head"])
def test_every_parameter_has_a_rule_raw_and_prepared(name):
    network = tiny_head() if name == "head" else network_of(PRESETS[name])
    params = ones(network.config)
    raw = specs(params)
    assert sum(spec != P(*(None,) * len(spec)) for spec in raw.values()) > len(raw) / 2
    assert raw[
        "layer_0/attention/q" if "layer_0/attention/q" in raw else "core_0/attention/q"
    ] == P("fsdp", "tensor", None)
    assert len(specs(network.prepare(params))) >= len(jax.tree.leaves(network.prepare(params)))


def test_what_drafts_beside_a_model_has_rules_raw_and_prepared():
    network, params = tiny_drafter(), tiny_drafter_params()
    for given in (params, network.prepare(params)):
        assert len(specs(given)) == len(jax.tree.leaves(given))


@over(
    [
        (("embed", "mlp"), (8, 12), {"fsdp": 4, "tensor": 2}, P("fsdp", "tensor"), 0),
        (("embed", "mlp"), (6, 16), {"fsdp": 4, "tensor": 2}, P(None, ("tensor", "fsdp")), 1),
        (("embed", "mlp"), (6, 12), {"fsdp": 4, "tensor": 2}, P(None, "tensor"), 2),
        (
            ("embed", "heads", "head_dim"),
            (8, 55, 96),
            {"fsdp": 4, "tensor": 2},
            P("fsdp", None, None),
            1,
        ),
        (("vocab", "embed"), (7, 8), {"fsdp": 2, "tensor": 2}, P(None, "fsdp"), 1),
        (("vocab", "embed"), (8, 7), {"fsdp": 2, "tensor": 1}, P("fsdp", None), 1),
        (("embed",), (8,), {"fsdp": 2, "tensor": 2}, P(None), 0),
        (("mlp",), (8,), {"fsdp": 2, "tensor": 2}, P("tensor"), 0),
        (("conditioning", "conditioning"), (8, 8), {"fsdp": 2, "tensor": 2}, P("fsdp", None), 0),
    ],
    argument="names, shape, sizes, spec, missed",
)
def test_an_axis_that_does_not_divide_falls_to_the_next_rule(names, shape, sizes, spec, missed):
    found, why = assign(names, shape, sizes)
    assert found == spec and len(why) == missed


def test_rows_lie_over_data_and_fsdp_or_one_of_them():
    sizes = {"data": 2, "fsdp": 4, "tensor": 3}
    assert [row_axes(n, sizes) for n in (8, 4, 2, 3)] == [
        ("data", "fsdp"),
        ("fsdp",),
        ("data",),
        None,
    ]
    batch = {"tokens": jnp.zeros((4, 3), jnp.int32), "count": jnp.int32(3)}
    found = row_shardings(batch, MESH)
    assert found["tokens"].spec == P(("fsdp",)) and found["count"].spec == P()


def test_huginn_keeps_its_heads_whole_and_the_layout_says_so():
    told = layout(parameter_shapes(PRESETS["huginn-0125"]), MESH)
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert "kv_heads 55 is not a multiple of tensor 2" in lines["core_*/attention/k"]
    assert "mlp: tensor" in lines["core_*/mlp/down"] and "embed: fsdp" in lines["core_*/mlp/down"]
    assert "not a multiple" not in lines["core_*/attention/k_bias"]  # a vector may lie whole
    assert told.startswith("mesh data 1, fsdp 2, tensor 2: ")


@over(["adamw", "muon"], argument="kind")
def test_a_state_lies_as_its_parameters(kind):
    config = PRESETS["test-recurrent"]
    shapes = parameter_shapes(config)
    optimizer = adamw(1e-3, 4) if kind == "adamw" else muon(1e-3, 4, axes=matrix_axes(config))

    def create(params):
        return TrainState.create(params, optimizer, jax.random.key(0), ema=True, teacher=params)

    state, placed = jax.eval_shape(create, shapes), shardings(shapes, MESH)
    found = shardings_like(state, shapes, placed, MESH)
    assert found.params == found.ema == found.teacher == placed
    moments = [
        (leaf.shape, where.spec)
        for leaf, where in zip(
            jax.tree.leaves(state.opt_state), jax.tree.leaves(found.opt_state), strict=True
        )
    ]
    wanted = {
        (leaf.shape, where.spec)
        for leaf, where in zip(*map(jax.tree.leaves, (shapes, placed)), strict=True)
    }
    assert set(moments) - wanted <= {((), P()), ((3,), P())}  # counts, Muon's coefficients
    assert sum(bool(shape) for shape, _ in moments) >= len(jax.tree.leaves(shapes))
    assert found.key.spec == found.step.spec == P()


def test_what_is_refused():
    unknown = {"layer_0": {"gadget": jnp.zeros((2, 2))}}
    with pytest.raises(ValueError, match=r"layer_0/gadget of shape .* has no logical axes"):
        shardings(unknown, MESH)
    explicit = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
    for refuse in (shardings, row_shardings):
        with pytest.raises(
            ValueError, match=r"axes fsdp of the mesh are Explicit.*paradec_jax.make_mesh"
        ):
            refuse({}, explicit)
    one = jax.devices()[:1]
    assert pd.make_mesh(devices=one).shape == {"data": 1, "fsdp": 1, "tensor": 1}
    for sizes, sentence in (
        ((0,), "data=0, fsdp=-1"),
        ((1, 2), "fsdp=2, tensor=1 do not make up 1 devices"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pd.make_mesh(*sizes, devices=one)
