"""The transformer of block diffusion: what it is, its cache, the layout of training as two calls, who refuses it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transformer import ATOL, call, params_of, positions_of

from paradec_jax import decode
from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, CAUSAL_PRESETS, TokenSpec
from paradec_jax.decode import Prefix
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.families import network_of
from paradec_jax.losses import next_token_loss
from paradec_jax.models import TransformerNetwork
from paradec_jax.nn import masks

BASE = BLOCK_DIFFUSION_PRESETS["test-sdar"]
CLEAN = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
NOISY = jnp.where(jnp.array([0, 1, 1, 0, 1, 0, 1, 1], bool), 31, CLEAN)


def test_facts_of_the_network():
    network = network_of(BASE)
    assert isinstance(network, CachedNetwork)
    assert (network.visibility, network.block, network.counters) == ("block", 4, ())
    assert network != network_of(dataclasses.replace(BASE, block=8))
    fields = {name: value for name, value in BASE.to_dict().items() if name not in ("block", "blocks")}
    causal = network_of(dataclasses.replace(CAUSAL_PRESETS["test-causal"], **fields))
    assert (causal.visibility, causal.block) == ("causal", None) and network != causal
    assert network.work(2, 4, 16) == causal.work(2, 4, 16)
    assert (network.max_length, causal.max_length) == (128, 128)


def test_only_whole_blocks_count_as_room():
    """A text's last block is read whole, so a prompt and its new tokens must leave room for it."""
    odd = dataclasses.replace(BASE, max_length=30)
    assert network_of(odd).max_length == 28 and network_of(dataclasses.replace(odd, block=8)).max_length == 24
    assert network_of(dataclasses.replace(odd, blocks=(4, 6))).max_length == 24
    decoder = decode.BlockDenoising(network_of(odd), 30, TokenSpec(mask=31, alignment="own"))
    with pytest.raises(ValueError, match="size 30 is more than the 28 positions the model was built for"):
        decode.run(decoder, None, decode.make_request([[1, 2]], max_new_tokens=27))


def test_the_next_token_is_no_objective_where_it_is_seen():
    with pytest.raises(ValueError, match="trains networks of visibility 'causal', but this one's is 'block'"):
        next_token_loss(network_of(BASE))


def test_a_block_of_one_is_causal():
    single = dataclasses.replace(BASE, block=1)
    fields = {name: value for name, value in BASE.to_dict().items() if name not in ("block", "blocks")}
    causal = dataclasses.replace(CAUSAL_PRESETS["test-causal"], **fields)
    logits, _ = call(TransformerNetwork(single), params_of(BASE), CLEAN, positions_of(CLEAN))
    want, _ = call(TransformerNetwork(causal), params_of(BASE), CLEAN, positions_of(CLEAN))
    np.testing.assert_allclose(logits, want, atol=ATOL)


@pytest.mark.parametrize(
    ("start", "width"), [((2, 4), 4), ((3, 5), 3)], ids=["blocks", "from inside a block"]
)
def test_cached_equals_uncached(start, width):
    """Windows that end where a block does; rows stand at different lengths, what lies beyond is scratch."""
    network, params = TransformerNetwork(dataclasses.replace(BASE, block=2)), params_of(BASE)
    visible = jnp.array(start)
    want, kv = call(network, params, CLEAN, positions_of(CLEAN))
    cache = network.write(network.init_cache(jnp.zeros(2), 12), kv, jnp.zeros(2, jnp.int32))
    window = jnp.stack([row[at : at + width] for row, at in zip(CLEAN, start, strict=True)])
    logits, own = call(network, params, window, positions_of(window, visible), Prefix(cache, visible))
    for row, at in enumerate(start):
        np.testing.assert_allclose(logits[row], want[row, at : at + width], atol=ATOL)
    for new, old in zip(network.write(cache, own, visible), cache, strict=True):
        np.testing.assert_allclose(new.k, old.k, atol=ATOL)
        np.testing.assert_allclose(new.v, old.v, atol=ATOL)


def test_candidates_of_a_block_side_by_side():
    """Two guesses of a block share what is cached; each sees itself whole, and neither the other."""
    network, params = TransformerNetwork(BASE), params_of(BASE)
    _, kv = call(network, params, CLEAN[:, :4], positions_of(CLEAN[:, :4]))
    prefix, guesses = Prefix(kv, jnp.full(2, 4)), (CLEAN[:, 4:], NOISY[:, 4:])
    positions = jnp.tile(4 + jnp.arange(4), (2, 2))
    packed = jnp.concatenate(guesses, axis=1)
    logits, _ = call(network, params, packed, positions, prefix, masks.candidates(2, 4))
    for i, guess in enumerate(guesses):
        alone, _ = call(network, params, guess, positions[:, :4], prefix)
        np.testing.assert_allclose(logits[:, 4 * i : 4 * i + 4], alone, atol=ATOL)


# The layout of training. The second row holds two texts, of 5 and of 3 tokens.

POSITIONS = jnp.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2]])
TEXT = jnp.array([[0] * 8, [0] * 5 + [1] * 3])
SAME = TEXT[:, :, None] == TEXT[:, None]


def doubled(network, params):
    """Head inputs of the noisy and of the clean stream: one call on both side by side."""
    block, whole = network.block, SAME & masks.block_causal(POSITIONS, network.block)
    own, before = masks.block_diagonal(POSITIONS, block), masks.strictly_before(POSITIONS, block)
    mask = jnp.block([[SAME & own, SAME & before], [jnp.zeros_like(whole), whole]])
    tokens, positions = jnp.concatenate([NOISY, CLEAN], 1), jnp.concatenate([POSITIONS, POSITIONS], 1)
    return jnp.split(network.forward(params, tokens, positions, None, mask).hidden, 2, axis=1)


def two_calls(network, params):
    """The same: a call on the clean stream, then one on the noisy stream with the clean keys as its cache."""
    block = network.block
    clean = network.forward(params, CLEAN, POSITIONS, None, SAME & masks.block_causal(POSITIONS, block))
    prefix = Prefix(clean.kv, SAME & masks.strictly_before(POSITIONS, block))
    own = SAME & masks.block_diagonal(POSITIONS, block)
    return network.forward(params, NOISY, POSITIONS, prefix, own).hidden, clean.hidden


@pytest.mark.parametrize("block", [3, 4])
def test_the_doubled_layout_is_two_calls(block):
    """Values of both streams, and gradients of what is read from the noisy one."""
    network, params = TransformerNetwork(dataclasses.replace(BASE, block=block)), params_of(BASE)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, BASE.vocab_size)), jnp.float32)

    def objective(streams, params):
        noisy, clean = streams(network, params)
        return jnp.sum(weights * jax.nn.log_softmax(network.logits(params, noisy))), (noisy, clean)

    found = [
        jax.jit(jax.value_and_grad(functools.partial(objective, streams), has_aux=True))(params)
        for streams in (doubled, two_calls)
    ]
    (value, streams), gradient = found[0]
    (other, others), same = found[1]
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for a, b in zip(others, streams, strict=True):
        np.testing.assert_allclose(a, b, atol=ATOL)

    def close(a, b):
        assert float(jnp.max(jnp.abs(b))) > 0
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.max(jnp.abs(b))), rtol=0)

    jax.tree.map(close, same, gradient)


def test_a_query_sees_its_part_of_the_cache():
    """A key hidden from one query of one row changes what that query reads, and nothing else."""
    network, params = TransformerNetwork(BASE), params_of(BASE)
    _, kv = call(network, params, CLEAN[:, :4], positions_of(CLEAN[:, :4]))
    window, positions = CLEAN[:, 4:], positions_of(CLEAN[:, 4:], 4)
    shallow = TransformerNetwork(dataclasses.replace(BASE, layers=1))  # so that no other query hears of it
    visible = jnp.ones((2, 4, 4), bool)
    want, _ = call(shallow, params, window, positions, Prefix(kv[:1], jnp.array([4, 4])))
    whole, _ = call(shallow, params, window, positions, Prefix(kv[:1], visible))
    part, _ = call(shallow, params, window, positions, Prefix(kv[:1], visible.at[1, 2, 0].set(False)))
    np.testing.assert_allclose(whole, want, atol=ATOL)
    moved = jnp.abs(part - want).max(-1) > 1e-3
    assert moved.tolist() == [[False] * 4, [False, False, True, False]]


@pytest.mark.parametrize(
    ("decoder", "served"),
    [(decode.AutoRegressive(), "causal"), (decode.Jacobi(block=4), "causal"), (decode.Masked(), "full")],
)
def test_decoders_of_another_visibility_refuse_it(decoder, served):
    name = type(decoder).__name__
    message = f"{name} decodes networks of visibility '{served}', but this one's is 'block'"
    with pytest.raises(ValueError, match=message):
        decoder.bind(network_of(BASE), 16, TokenSpec(mask=31, alignment="own"))
