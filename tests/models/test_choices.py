"""Fields of a config that change how a network is computed and not what: the same values,
gradients, platforms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from marks import over, slow

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.config.bounds import ATTENTIONS, REMATS
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.families import PRESETS, network_of, parameter_shapes
from paradec_jax.models import transformer
from paradec_jax.nn import attention, backend
from paradec_jax.nn.blocks import PreNormBlock
from paradec_jax.nn.scan import in_turn

QUERIES, WIDTH = 4, 11
CONFIGS = {name: PRESETS[f"test-{name}"] for name in ("recurrent", "causal", "sdar", "mdlm")}
CONFIGS["windows"] = dataclasses.replace(
    CONFIGS["causal"], sliding_window=3, sliding_layers=(True, False)
)
CONFIGS["head"] = ResidualHeadConfig.of(CONFIGS["sdar"], layers=2)
CACHED = [name for name in CONFIGS if name != "mdlm"]
TOKENS = jnp.arange(2 * WIDTH, dtype=jnp.int32).reshape(2, WIDTH) % 7 + 3


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", QUERIES)


def changed(name: str, **fields):
    """A network of a family at fewer recurrences, with fields of its config changed."""
    network = network_of(dataclasses.replace(CONFIGS[name], **fields))
    return network.at(2) if name == "recurrent" else network


@functools.cache
def params_of(name: str):
    leaves, tree = jax.tree.flatten(parameter_shapes(CONFIGS[name]))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def read(name, network, params, tokens, positions, prefix=None):
    """The head inputs of a window and what it leaves; a head reads vectors."""
    if name == "recurrent" and prefix is None:
        keys = jax.random.split(jax.random.key(0), len(tokens))
        prefix = Prefix(network.init_cache(keys, WIDTH), None)
    if name != "head":
        return network.forward(params, tokens, positions, prefix)
    vectors = jnp.sin(tokens[..., None] * jnp.arange(1.0, 1 + network.config.width))
    return network.forward(params, vectors, positions, prefix, hidden=jnp.cos(vectors))


def squares(name, network, split: int):
    """Of the head inputs, those after the first `split` positions over a cache that holds these."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH), TOKENS.shape)

    def value(params):
        if not split:
            return jnp.mean(read(name, network, params, TOKENS, positions).hidden ** 2)
        first = read(name, network, params, TOKENS[:, :split], positions[:, :split])
        empty = network.init_cache(jax.random.split(jax.random.key(0), len(TOKENS)), WIDTH)
        cache = network.write(empty, first.kv, jnp.zeros(2, jnp.int32))
        prefix = Prefix(cache, jnp.asarray([split, 1]))
        return jnp.mean(
            read(name, network, params, TOKENS[:, split:], positions[:, split:], prefix).hidden ** 2
        )

    return jax.jit(jax.value_and_grad(value))


@functools.cache
def plain(name: str, split: int):
    """Values and gradients of dense attention, of which all is kept."""
    return squares(name, changed(name, attention="dense", remat="none"), split)(params_of(name))


def same(name, split=0, atol=1e-5, **fields):
    """Values and gradients with fields changed, against those without."""
    want, got = plain(name, split), squares(name, changed(name, **fields), split)(params_of(name))
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a / scale, b / scale, atol=atol), got, want
    )


@over(
    [
        *((name, 0) if name == "causal" else slow(name, 0) for name in CONFIGS),
        *((name, 2) if name == "causal" else slow(name, 2) for name in CACHED),
    ],
    argument="name, split",
)
def test_blocked_attention_is_dense_attention(name, split):
    same(name, split, attention="blocked")


@over(["none", "layer"], argument="remat")
@over(["causal", slow("windows"), "mdlm", slow("sdar")])
def test_scanned_layers_are_layers_one_by_one(name, remat):
    same(name, remat=remat, scan_layers=True)


@over(["causal", "windows", "sdar"])
@pytest.mark.slow
def test_scanned_layers_read_a_cache(name):
    same(name, 2, remat="layer", scan_layers=True)


@over([False, True], argument="scan")
def test_a_decoding_loop_stacks_no_caches(scan):
    """Only raw parameters, those of training, pass a cached window through a loop over layers."""
    network = changed("causal", scan_layers=True)
    params = params_of("causal") if scan else network.prepare(params_of("causal"))
    cache = network.init_cache(jax.random.split(jax.random.key(0), 2), WIDTH)
    positions = jnp.broadcast_to(jnp.arange(1), (2, 1))

    def step(params):
        return network.forward(
            params, TOKENS[:, :1], positions, Prefix(cache, jnp.zeros(2, jnp.int32))
        )

    assert ("scan[" in str(jax.make_jaxpr(step)(params))) == scan


@over(["causal", "windows", "sdar"], ["sdar", "causal"])
def test_a_module_called_on_texts_sees_what_its_network_does(name):
    scaling = {"kind": "llama3", "factor": 8.0, "original": 4}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    network, params = changed(name, rope_scaling=scaling), params_of(name)
    out = network.forward(params, TOKENS, jnp.broadcast_to(jnp.arange(WIDTH), TOKENS.shape))
    found = network.module.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(found, network.logits(params, out.hidden), rtol=1e-5, atol=1e-5)


@over(["causal", "sdar"])
def test_decoding_traces_one_layer_for_all(name, monkeypatch):
    """Its program is that of layers one by one, operation for operation."""
    network, calls, usual = changed(name, attention="dense"), [], PreNormBlock.__call__
    params, cache = network.prepare(params_of(name)), network.init_cache(jnp.zeros(2), WIDTH)
    positions = jnp.broadcast_to(jnp.arange(WIDTH), TOKENS.shape)

    def program() -> str:
        prefix = Prefix(cache, jnp.asarray([2, 1]))
        return (
            jax.jit(lambda p: network.forward(p, TOKENS, positions, prefix)).lower(params).as_text()
        )

    monkeypatch.setattr(PreNormBlock, "__call__", lambda *args: calls.append(1) or usual(*args))
    shared = program()
    assert len(calls) == 1 < network.config.layers
    one_by_one = lambda call, x, block, layers, given: in_turn(  # noqa: E731
        call, x, [functools.partial(block.apply, {"params": params}) for params in layers], given
    )
    monkeypatch.setattr(transformer, "traced_once", one_by_one)
    assert program() == shared and len(calls) == 1 + network.config.layers


@over(["causal", slow("mdlm"), slow("recurrent")])
def test_scores_in_bfloat16(name):
    """They are summed and kept in float32, from raw parameters and from prepared ones."""
    low = changed(name, dtype="bfloat16", param_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of(name))
    positions = jnp.broadcast_to(jnp.arange(WIDTH), TOKENS.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def call(network, params):
        hidden = read(name, network, params, TOKENS, positions).hidden
        return network.logits(params, hidden), hidden

    want, _ = call(changed(name), params_of(name))
    for given in (params, low.prepare(params)):
        logits, hidden = call(low, given)
        assert logits.dtype == jnp.float32 and hidden.dtype == jnp.bfloat16
        assert (logits != logits.astype(jnp.bfloat16)).any()
        assert float(jnp.max(jnp.abs(logits - want))) < 0.1 * float(jnp.max(jnp.abs(want)))


@over(["causal", "recurrent"])
def test_caches_in_bfloat16(name, monkeypatch):
    """In float32 on a CPU, which reads parts of nothing else well."""
    network, keys = changed(name, dtype="bfloat16"), jax.random.split(jax.random.key(0), 1)
    for layouts, dtype in (("cpu", "float32"), ("plain", "bfloat16")):
        monkeypatch.setenv(backend.SWITCH, layouts)
        cache = network.init_cache(keys, 4)
        layers = (cache.kv.prelude, cache.kv.core) if name == "recurrent" else cache
        assert {leaf.dtype.name for leaf in jax.tree.leaves(layers)} == {dtype}


@over(ATTENTIONS)
def test_every_backend_lowers(name):
    """For GPU and TPU, from a process that has neither; a backend that is not there gives way."""
    params = params_of("causal")
    exported = export.export(
        squares("causal", changed("causal", attention=name), 0), platforms=("cuda", "tpu")
    )
    assert exported(params).platforms == ("cuda", "tpu")


@over([name for name in REMATS if name != "none"], argument="remat")
@over(CONFIGS, CONFIGS.keys() - {"causal"})
def test_what_is_computed_anew_changes_no_gradient(name, remat):
    same(name, remat=remat)


def test_what_the_backward_pass_keeps():
    """Of a block of 4 D x D and 3 D x F products: its input, the products' outputs too, its input
    on the host.
    """
    params = params_of("causal")

    def value(remat):
        return squares("causal", changed("causal", attention="dense", remat=remat), 0)

    texts = {remat: str(jax.make_jaxpr(value(remat))(params)) for remat in REMATS}
    assert "checkpoint" not in texts["none"] and "remat" not in texts["none"]
    products = {remat: text.count("dot_general") for remat, text in texts.items()}
    scores = 2 * CONFIGS["causal"].layers  # products of activations, two a layer
    assert products["none"] + scores == products["dots"] < products["layer"] == products["offload"]
    assert "MemorySpace.Host" in texts["offload"] and "MemorySpace.Host" not in texts["layer"]


def test_offload_is_refused_where_the_host_keeps_nothing(monkeypatch):
    class Device:
        device_kind = "abacus"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(backend.jax, "devices", lambda: [Device()])
    with pytest.raises(ValueError, match="devices of kind 'abacus' cannot: use 'layer'"):
        jax.eval_shape(
            squares("causal", changed("causal", remat="offload"), 0), params_of("causal")
        )
