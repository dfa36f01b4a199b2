"""The stub networks notice what a position sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import StubCausal, StubDenoiser

from paradec_jax.decode.machine import network


def test_the_causal_stub_notices_what_a_position_sees():
    """Right tokens through window or cache; another token where a position is missing, seen twice
    or misplaced.
    """
    stub = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)
    tokens, positions = jnp.array([[4, 7, 9, 4, 7, 9]]), jnp.arange(6)[None]

    def last(positions=positions[:, 3:], visible=3, cached=3, **options):
        empty = stub.init_cache(jax.random.split(jax.random.key(0), 1), 8)
        cache = stub.write(empty, stub.pick(whole.kv, jnp.array([0]), cached), jnp.array([0]))
        prefix = network.Prefix(cache, jnp.array([visible]))
        out = stub.forward(None, tokens[:, 3:], positions, prefix, **options)
        return int(stub.logits(None, out.hidden)[0, -1].argmax())

    whole = stub.forward(None, tokens, positions)
    assert stub.logits(None, whole.hidden)[0, 2:].argmax(-1).tolist() == [4, 7, 9, 4]
    assert stub.expected([4, 7, 9], 4) == [4, 7, 9, 4] and last() == 4
    for wrong in (
        {"visible": 2},
        {"visible": 4, "cached": 4},
        {"positions": jnp.array([[3, 4, 6]])},
        {"mask": jnp.tril(jnp.ones((3, 3), bool)).at[2, 1].set(False)},
    ):
        assert last(**wrong) != 4


@pytest.mark.parametrize("options", [{}, {"alignment": "next"}, {"block": 4}])
def test_the_denoiser_fills_a_canvas_in_any_order(options):
    stub = StubDenoiser(**options)
    text = [3, None, None, 4, None, None, 7, None]
    want, canvas = stub.expected(text), [stub.mask if token is None else token for token in text]
    assert want == [3, 5, 7, 4, 6, 8, 7, 9]
    positions, shift = jnp.arange(8)[None], stub.alignment == "next"
    for p in (5, 1, 7, 4, 2):
        out = stub.forward(None, jnp.array([canvas]), positions)
        filled = stub.logits(None, out.hidden)[0].argmax(-1).tolist()
        assert filled[p - shift] == want[p]
        canvas[p] = filled[p - shift]
    assert canvas == want


@pytest.mark.parametrize("per_query", [False, True])
def test_the_denoiser_notices_what_a_position_sees(per_query):
    """Its block in the window and the rest of the canvas in the cache, once each."""
    stub, positions = StubDenoiser(), jnp.arange(8)[None]
    whole = stub.forward(None, jnp.full((1, 8), stub.mask).at[0, 2].set(5), positions)
    cache = stub.write(stub.init_cache(jnp.zeros(1), 9), whole.kv, jnp.array([0]))
    window, mask = stub.pick(whole.kv, jnp.array([4]), 3), jnp.ones((3, 3), bool)

    @jax.jit
    def found(visible):
        visible = jnp.stack([visible] * 3, axis=1) if per_query else visible
        prefix = network.Prefix(cache, visible)
        out = stub.forward(None, window.tokens, window.positions, prefix, mask)
        return stub.logits(None, out.hidden)[0].argmax(-1)

    right = stub.expected([None, None, 5, *[None] * 5])[4:7]
    assert found(np.isin(np.arange(9), (0, 1, 2, 3, 7))[None]).tolist() == right
    for wrong in ((0, 1, 2, 3, 4, 7), (0, 2, 3, 7), (0, 1, 2, 3, 8)):
        assert (found(np.isin(np.arange(9), wrong)[None]) != np.array(right)).all(), wrong
