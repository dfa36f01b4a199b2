"""Rematerialisation and truncation of the recurrent losses, as the config says or a loss is told, and chunks."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from stubs import tiny_causal, tiny_network, tiny_params

from paradec_jax.config import TokenSpec
from paradec_jax.families import parameter_shapes
from paradec_jax.losses import next_token_loss, recurrent_consistency_loss, recurrent_loss, stepwise_loss
from paradec_jax.losses.consistency import ConsistencyRules

SPEC = TokenSpec(bos=1, stop=(2,), pad=0)
RULES = ConsistencyRules(context="clean", after_eos="keep", ar_weight=2.0)
TOKENS = jnp.asarray([[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]])
BATCHES = {
    "next token": {"tokens": TOKENS, "targets": TOKENS, "weights": jnp.ones((2, 5)), "step": jnp.int32(0)},
    "consistency": {
        "prompt": TOKENS[:, :4],
        "prompt_lengths": jnp.array([4, 4]),
        "noisy": jnp.array([[[13, 30, 29]], [[28, 17, 18]]]),
        "clean": jnp.array([[[13, 14, 15]], [[16, 17, 18]]]),
        "pairs": jnp.array([1, 1]),
        "step": jnp.int32(0),
    },
    "stepwise": {
        "tokens": TOKENS,
        "targets": jnp.arange(2 * 3 * 2).reshape(2, 3, 2),
        "recurrences": jnp.int32(3),
        "prompt_targets": TOKENS[:, :3],
        "prompt_weights": jnp.ones((2, 3)),
        "step": jnp.int32(0),
    },
}


def loss_of(name, network, depth, **options):
    def draw(key, step):
        return jnp.int32(3)

    if name == "next token":
        return recurrent_loss(network, draw, depth, **options)
    if name == "stepwise":
        return stepwise_loss(network, draw, depth, **options)
    return recurrent_consistency_loss(network, draw, depth, SPEC, RULES, **options)


@functools.cache
def gradient(name, depth=None, told=None, remat="none", mean_backprop_depth=2, chunk=None):
    """Gradients of a loss, and whether its program holds a rematerialised region."""
    network = tiny_network(remat=remat, mean_backprop_depth=mean_backprop_depth)
    loss, params, batch = loss_of(name, network, depth, remat=told, chunk=chunk), tiny_params(), BATCHES[name]
    found = jax.jit(jax.grad(lambda p: loss(p, p, batch, jax.random.key(3))[0]))
    return found(params), "prevent_cse" in str(jax.make_jaxpr(found)(params))


@pytest.mark.parametrize("name", BATCHES)
def test_remat_is_read_from_the_config(name):
    (plain, kept), (again, remade) = gradient(name), gradient(name, remat="iteration")
    assert remade and not kept
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-6)
    assert not gradient(name, told=False, remat="iteration")[1]


@pytest.mark.parametrize("name", BATCHES)
def test_the_depth_is_read_from_the_config(name):
    chex.assert_trees_all_equal(gradient(name)[0], gradient(name, depth=2, mean_backprop_depth=1)[0])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(gradient(name)[0], gradient(name, mean_backprop_depth=1)[0], rtol=1e-2)


@pytest.mark.parametrize("name", BATCHES)
def test_no_depth_and_no_chunk_are_refused(name):
    with pytest.raises(ValueError, match="backprop_depth must be at least 1, not 0"):
        loss_of(name, tiny_network(), 0)
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        loss_of(name, tiny_network(), None, chunk=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "next token" else ()) for name in BATCHES]
)
def test_logits_of_a_chunk(name):
    """Two positions at a time, the last chunk not whole: the same gradients."""
    chex.assert_trees_all_close(gradient(name, chunk=2)[0], gradient(name)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["recurrent", "causal"])
def test_logits_of_all_positions_are_never_held(kind):
    """Neither forward nor backward, nor as the gradient of the logits."""
    width, vocab = 13, 37
    network = (tiny_network if kind == "recurrent" else tiny_causal)(vocab_size=vocab)
    params = parameter_shapes(network.config)
    tokens = jnp.ones((2, width), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones((2, width)), "step": jnp.int32(0)}

    def text(chunk):
        if kind == "recurrent":
            loss = recurrent_loss(network, lambda key, step: jnp.int32(2), 1, chunk=chunk)
        else:
            loss = next_token_loss(network, chunk=chunk)
        value = jax.value_and_grad(lambda p: loss(p, None, batch, jax.random.key(0)), has_aux=True)
        return jax.jit(value).lower(params).as_text()

    whole = [f"2x{width}x{vocab}x", f"{2 * width}x{vocab}x"]
    assert any(shape in text(None) for shape in whole)
    assert not any(shape in text(4) for shape in (*whole, f"2x16x{vocab}x"))
