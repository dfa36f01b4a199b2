"""Several guesses of the same positions side by side: their window, and decoders that verify them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from results import listed
from stubs import PROMPTS, StubCausal, StubNetwork, tiny_network, tiny_params, tiny_request

from experiments.replicas import ReleasedMultiBlock, multiblock
from paradec_jax.decode import Jacobi, Static, run
from paradec_jax.decode.causal import jacobi
from paradec_jax.decode.machine.candidates import fold_candidates, on_smallest, pick


def test_candidates_share_positions_and_do_not_see_each_other():
    tokens = jnp.arange(12).reshape(2, 2, 3)
    folded, positions, mask = fold_candidates(tokens, jnp.array([4, 7]))
    assert folded.tolist() == tokens.reshape(2, 6).tolist()
    assert positions.tolist() == [[4, 5, 6] * 2, [7, 8, 9] * 2]
    assert mask.tolist() == np.kron(np.eye(2), np.tri(3)).astype(bool).tolist()
    assert pick(folded, jnp.array([1, 0]), 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert fold_candidates(tokens[:, :1], jnp.array([4, 7]))[2] is None


@pytest.mark.slow
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
    most = request.lengths + 3 + (calls - 1) * 3 * 4  # the prompt with its drafts, then all candidates ..
    spared = most - found.positions  # .. but in the first call, whose candidates repeat the draft
    assert (spared % 8 == 0).all() and (spared >= 8).all() and (spared < (calls - 1) * 8).all()


def test_a_candidate_wins_on_a_recurrent_network():
    """On a text whose next-best guess is never right candidates cost positions; with a pool they save calls."""
    network, request = StubNetwork(needed=(1,)), tiny_request(12)
    plain = run(Jacobi(network, 24, block=4), {}, request)
    more = run(Jacobi(network, 24, block=4, pool=3), {}, request)
    expected = [network.expected(prompt, 12) for prompt in ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))]
    assert plain.completions() == more.completions() == expected
    assert (more.network_calls <= plain.network_calls).all()
    assert (more.positions > plain.positions).all()


# What is not there is not computed


@pytest.mark.parametrize(
    ("running", "shape"),
    [((1, 1, 1), (3, 8)), ((0, 1, 1), (3, 4)), ((1, 0, 0), (1, 8)), ((0, 0, 1), (1, 4)), ((0, 0, 0), (1, 4))],
)
def test_the_smallest_shape_that_holds_the_running_rows(running, shape):
    count, width = jnp.array([1, 2, 1]), jnp.array([5, 4, 3])
    found = on_smallest(jnp.asarray, (1, 3), (4, 8), count, width, jnp.array(running) > 0)
    assert tuple(found.tolist()) == shape
    assert on_smallest(lambda shape: shape, (1, 1), (4, 4), count, width, jnp.array(running) > 0) == (1, 4)


@dataclasses.dataclass(frozen=True)
class Measured(StubCausal):
    """Tells its probe how many positions a call computes."""

    def forward(self, params, inputs, *args):
        jax.debug.callback(functools.partial(self.probe, inputs.shape[1]))
        return super().forward(params, inputs, *args)


REPEATING = {"weights": (0, 0, 1, 0), "slope": 0, "constant": 0}  # the text has period 3
SPARING = {  # decoder, options, positions of its smallest call
    "candidates": (Jacobi, {"block": 4, "candidates": 3}, 4),
    "blocks": (Jacobi, {"block": 3, "blocks": 2}, 3),
    "blocks and a pool": (
        Jacobi,
        {"block": 3, "blocks": 2, "pool": 1},
        6,
    ),  # the pool remembers the whole width
    "released": (ReleasedMultiBlock, {"block": 4, "in_flight": 2, "pool": 4}, 4),
}


def computed(name, *, alone=None):
    """A result, and the positions of each call that really ran, in ascending order."""
    kind, options, _ = SPARING[name]
    ran: list = []
    prompts = PROMPTS if alone is None else [PROMPTS[alone]]
    decoder = kind(Measured(**REPEATING, probe=ran.append), 48, **options)
    result = listed(run(decoder, None, tiny_request(20, prompts=prompts)))
    jax.effects_barrier()
    return result, sorted(size for size in ran if isinstance(size, int))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "released" else name for name in SPARING]
)
def test_a_call_computes_what_is_there(name, monkeypatch):
    """A row by itself pays for the positions that its calls computed, and the largest shape writes the same."""
    kind, _, smallest = SPARING[name]
    result, sizes = computed(name, alone=1)
    assert len(sizes) == result["network_calls"][0] and sizes[0] == smallest
    if kind is Jacobi:
        assert sum(sizes) == result["positions"][0]
    else:  # its window shrinks with the block, the compiled ones do not
        assert sum(sizes) > result["positions"][0]
    spared, small = computed(name)
    for module in (jacobi, multiblock):
        monkeypatch.setattr(
            module, "on_smallest", lambda call, counts, widths, *_: call((counts[-1], widths[-1]))
        )
    whole, large = computed(name)
    assert whole == spared and sum(small) < sum(large)
