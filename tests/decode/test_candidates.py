"""Several guesses of the same positions side by side: their window, and decoders that verify them."""

import jax.numpy as jnp
import numpy as np
import pytest

from paradec_jax.decode import Jacobi, Static, run
from paradec_jax.decode.machine.candidates import fold_candidates, pick
from paradec_jax.testing import StubNetwork, tiny_network, tiny_params, tiny_request


def test_candidates_share_positions_and_do_not_see_each_other():
    tokens = jnp.arange(12).reshape(2, 2, 3)
    folded, positions, mask = fold_candidates(tokens, jnp.array([4, 7]))
    assert folded.tolist() == tokens.reshape(2, 6).tolist()
    assert positions.tolist() == [[4, 5, 6] * 2, [7, 8, 9] * 2]
    assert mask.tolist() == np.kron(np.eye(2), np.tri(3)).astype(bool).tolist()
    assert pick(folded, jnp.array([1, 0]), 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert fold_candidates(tokens[:, :1], jnp.array([4, 7]))[2] is None


@pytest.mark.parametrize("cache", ["shared", "full", "latest"])
def test_candidates_on_a_recurrent_network_write_what_static_decoding_writes(cache):
    """The winner's keys and values, those of all its recurrences, are what later positions see."""
    network, params, request = tiny_network(cache, recurrence=2), tiny_params(), tiny_request(8)
    static = run(Static(network, 20), params, request)
    decoder = Jacobi(network, 20, block=4, candidates=3)
    found = run(decoder, params, request)
    assert found.completions() == static.completions()
    calls = found.network_calls
    assert (calls <= static.network_calls).all()
    np.testing.assert_array_equal(found.counts["recurrences"], 2 * calls)
    read = request.lengths + 3 + (calls - 1) * 3 * 4  # the prompt with its drafts, then all candidates
    np.testing.assert_array_equal(found.positions, read)


def test_a_candidate_wins_on_a_recurrent_network():
    """On a text whose next-best guess is never right candidates cost positions; with a pool they save calls."""
    network, request = StubNetwork(needed=(1,)), tiny_request(12)
    plain = run(Jacobi(network, 24, block=4), {}, request)
    more = run(Jacobi(network, 24, block=4, pool=3), {}, request)
    expected = [network.expected(prompt, 12) for prompt in ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))]
    assert plain.completions() == more.completions() == expected
    assert (more.network_calls <= plain.network_calls).all()
    assert (more.positions > plain.positions).all()
