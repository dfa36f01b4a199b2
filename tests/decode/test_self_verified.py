"""Self-verification: its texts have the law of the network read in blocks of one position; which
rows are verified.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess
from marks import slow
from stubs import JointBlocks, tiny_blocks, tiny_blocks_params, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.block.self_verified import routed, worth
from paradec_jax.decode.rules import select, speculate

# Rules


def test_the_first_run():
    rows = ["x.xx", ".xx.x", "....", "xxxx"]
    for row, want in zip(rows, ["x...", ".xx..", "....", "xxxx"], strict=True):
        found = select.first_run(jnp.asarray([[letter == "x" for letter in row]]))
        assert "".join(".x"[int(x)] for x in found[0]) == want


def test_drafts_are_judged_from_left_to_right():
    """Chances 1, 0.5 and 0.25; the second number refuses, so the third draft is not looked at."""
    p = jnp.asarray([[[0.5, 0.5], [0.8, 0.2], [0.8, 0.2]]])
    q = jnp.asarray([[[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]]])
    drafts, span = jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool)
    uniforms = jnp.asarray([[0.9, 0.6, 0.1]])
    chance, accepted, refused, rest = speculate.judge(p, q, drafts, span, 1.0, uniforms)
    np.testing.assert_allclose(chance, [[1.0, 0.5, 0.25]])
    assert accepted.tolist() == [[True, False, False]]
    assert refused.tolist() == [[False, True, False]]
    np.testing.assert_allclose(rest, [[[0.0, 1.0]]])
    chance, accepted, refused, _ = speculate.judge(p, q, drafts, span, 0.5, uniforms)
    np.testing.assert_allclose(chance, [[1.0, 0.5**0.5, 0.5]])
    assert accepted.all() and not refused.any()


def test_a_row_is_verified_from_one_score_on_and_down_to_another():
    """E = .8 + .8 .5 = 1.2 for a span of two, less 0.5 and 0.1 for each of three sure positions."""
    chances = jnp.asarray([[0.9, 0.8, 0.5, 0.7]])
    span, sure = jnp.asarray([[False, True, True, False]]), jnp.asarray([[True, True, True, False]])
    knobs = decode.SelfVerified.Knobs(price=0.5, price_each=0.1, verify_from=0.5, verify_until=0.3)
    value = worth(chances, span, sure, knobs)
    np.testing.assert_allclose(value, [0.4], rtol=1e-6)
    for verified in (True, False):
        assert routed(value, jnp.asarray([verified]), knobs).tolist() == [verified]
    once = dataclasses.replace(knobs, verify_until=jnp.inf)
    assert not routed(value, jnp.asarray([True]), once).any()


# Laws


ALLOWED = 0.9  # share of the two symbols that may follow another one, of a chain of four


def chain(length: int = 4, symbols: int = 4) -> JointBlocks:
    """Texts in which each symbol is followed by itself or by the next one, but for a tenth."""
    step = np.full((symbols, symbols), (1 - ALLOWED) / (symbols - 2))
    for symbol in range(symbols):
        step[symbol, [symbol, (symbol + 1) % symbols]] = ALLOWED / 2
    law = np.full(symbols, 1 / symbols)
    for _ in range(length - 1):
        law = (law[..., None] * step).reshape(*law.shape, symbols)
    return JointBlocks(symbols, length, tuple(law.ravel().tolist()), 4)


def texts(network: Any, params: Any, length: int, draws: int, **options: Any) -> np.ndarray:
    knobs = options.pop("knobs", {})
    spec = TokenSpec(mask=network.vocab_size - 1, alignment="own")
    decoder = decode.SelfVerified(network, length, spec, **options)
    keys = jax.random.split(jax.random.key(7), draws)
    request = decode.make_request(np.zeros((draws, 0), int), max_new_tokens=length, keys=keys)
    knobs = decoder.Knobs(temperature=1.0, **knobs)
    return np.asarray(decode.run(decoder, params, request, knobs).tokens)


@pytest.mark.slow
def test_texts_of_a_chain_have_its_law():
    """A block's positions are drafted apart from one another, so that half of the drafts are wrong;
    what is kept of them without the verifier's exact rule has another law.
    """
    network = chain()
    assert excess(texts(network, None, 4, 4_000), network.law, 4) < 4
    lax = texts(network, None, 4, 4_000, knobs={"exponent": 0.2})
    assert excess(lax, network.law, 4) > 20
    sure = texts(network, None, 4, 4_000, extras=True, knobs={"threshold": 0.0})
    assert excess(sure, network.law, 4) > 20


SMALL = {"vocab_size": 4, "block": 3}  # three symbols and the mask


@functools.cache
def small(**changes: Any) -> tuple[Any, Any]:
    network = tiny_blocks(**SMALL | changes)
    return network, tiny_blocks_params(3, 3.0, **SMALL)


def law_of_blocks_of_one(length: int) -> np.ndarray:
    """The law of the texts that the network writes position after position, each a block."""
    network, params = small(block=1)
    every = np.indices((3,) * length).reshape(length, -1).T
    law, index = np.ones(len(every)), np.arange(length)
    positions = jnp.broadcast_to(index, every.shape)

    @jax.jit
    def probabilities(read):
        hidden = network.forward(params, read, positions).hidden
        return jax.nn.softmax(network.logits(params, hidden)[..., :3], axis=-1)

    for p in range(length):  # a mask at p, which sees the symbols before it
        probs = np.asarray(probabilities(jnp.where(index < p, every, 3)))[:, p]
        law *= np.take_along_axis(probs, every[:, p : p + 1], axis=1)[:, 0]
    return law


@pytest.mark.slow
def test_texts_of_a_model_have_the_law_of_blocks_of_one():
    """Two blocks, so that the first one's stored keys matter."""
    network, params = small()
    law = law_of_blocks_of_one(5)
    np.testing.assert_allclose(law.sum(), 1.0, rtol=1e-5)
    found = texts(network, params, 5, 3_000, causal=True)
    assert excess(found, law, 3) < 4
    assert excess(texts(network, params, 5, 3_000), law, 3) > 8, "keys of blocks seen whole"


@pytest.mark.parametrize(
    ("alignment", "fused"), [slow("own", True), slow("next", True), slow("own", False)]
)
def test_greedy_texts_are_those_of_blocks_of_one(alignment, fused):
    """From prompts with whole blocks and without, of a model of random weights."""
    params, request = tiny_blocks_params(1, 3.0), tiny_request(11, seed=2)
    spec, size = TokenSpec(mask=31, alignment=alignment), 24
    options = {"fuse_store": fused, "fuse_prompt": fused}
    one = decode.BlockDenoising(tiny_blocks(block=1), size, spec, rule="sequential")
    want = decode.run(one, params, request, one.Knobs())
    decoder = decode.SelfVerified(tiny_blocks(), size, spec, causal=True, **options)
    found = decode.run(decoder, params, request, decoder.Knobs())
    assert found.completions() == want.completions()
    seen = dataclasses.replace(decoder, causal=False)
    assert decode.run(seen, params, request, seen.Knobs()).completions() != want.completions()
