"""The stub networks are networks, equal by their fields, and notice what a position sees."""

import jax.numpy as jnp

from paradec_jax.decode import protocol
from paradec_jax.testing import StubCausal, StubNetwork


def test_stub_is_a_recurrent_network():
    for kind in (protocol.Network, protocol.RecurrentNetwork):
        for name in vars(kind):
            assert name.startswith("_") or hasattr(StubNetwork(), name), name
    assert StubNetwork() == StubNetwork() and hash(StubNetwork()) == hash(StubNetwork())


def test_stub_is_a_causal_network():
    for kind in (protocol.Network, protocol.CandidateNetwork):
        for name in vars(kind):
            assert name.startswith("_") or hasattr(StubCausal(), name), name
    assert StubCausal() == StubCausal() and hash(StubCausal()) == hash(StubCausal())


def test_the_causal_stub_notices_what_a_position_sees():
    """Right tokens through window or cache; another token where a position is missing, seen twice or misplaced."""
    stub = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)
    tokens, positions = jnp.array([[4, 7, 9, 4, 7, 9]]), jnp.arange(6)[None]

    def last(positions=positions[:, 3:], visible=3, cached=3, **options):
        cache = stub.write(stub.init_cache(1, 8), stub.pick(whole.kv, jnp.array([0]), cached), jnp.array([0]))
        out = stub.forward(None, tokens[:, 3:], positions, cache, jnp.array([visible]), **options)
        return int(stub.logits(None, out.hidden)[0, -1].argmax())

    whole = stub.forward(None, tokens, positions)
    assert stub.logits(None, whole.hidden)[0, 2:].argmax(-1).tolist() == [4, 7, 9, 4]
    assert stub.expected([4, 7, 9], 4) == [4, 7, 9, 4] and last() == 4
    for wrong in (
        {"visible": 2},
        {"visible": 4, "cached": 4},
        {"positions": jnp.array([[3, 4, 6]])},
        {"window_mask": jnp.tril(jnp.ones((3, 3), bool)).at[2, 1].set(False)},
    ):
        assert last(**wrong) != 4
