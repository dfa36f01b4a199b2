"""One call on a small tree of windows: what each sees, how much of a call runs, decoders that verify guesses."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from results import listed
from stubs import PROMPTS, StubCausal, StubNetwork, tiny_network, tiny_params, tiny_request
from stubs.base import TokenKV

from experiments.replicas import ReleasedMultiBlock
from paradec_jax.decode import Forward, Jacobi, PromptLookup, Static, run
from paradec_jax.decode.causal.jacobi import distinct
from paradec_jax.decode.machine import tree
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.shapes import on_smallest
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree


class Recorder(StubCausal):
    """Keeps what its calls are given; a hidden state is the token that was fed."""

    calls: ClassVar[list] = []

    def forward(self, params, inputs, positions, prefix=None, mask=None):
        self.calls.append((inputs, positions, mask))
        return Forward(inputs[..., None].astype(jnp.float32), TokenKV(inputs, positions), {})


@dataclasses.dataclass(frozen=True)
class InBlocks(Recorder):
    """As `Recorder`, of a network that sees in blocks of 3."""

    visibility: ClassVar[str] = "block"
    block: ClassVar[int] = 3


FED, AT = jnp.arange(12).reshape(2, 2, 3), jnp.array([4, 7])


def called(network, windows, **options):
    """A call for two rows, with the arguments that the network was given."""
    Recorder.calls.clear()
    cache = network.init_cache(AT, 16)
    return forward_tree(network, None, Prefix(cache, AT), windows, **options), list(Recorder.calls)


def star(*count):
    """2 windows of 3 tokens."""
    return Windows.star(FED, AT, jnp.array(count))


def test_windows_of_a_star_share_positions_and_do_not_see_each_other():
    keeps = functools.partial(Reading, kept=jnp.array([1, 0]))
    call, [(inputs, positions, mask)] = called(Recorder(), star(2, 2), read=keeps, bounded=True)
    assert inputs.tolist() == np.arange(12).reshape(2, 6).tolist()
    assert positions.tolist() == [[4, 5, 6] * 2, [7, 8, 9] * 2]
    assert mask.tolist() == np.kron(np.eye(2), np.tri(3)).astype(bool).tolist()
    assert call.each[..., 0].tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert call.kv.tokens.tolist() == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("count", "width", "fed", "positions"),
    [
        ([1, 1], [2, 1], [[0, 1], [6, 7]], [2, 2]),
        ([1, 1], [3, 1], [[0, 1, 2], [6, 7, 8]], [3, 2]),
        ([1, 2], [2, 2], [[0, 1, 3, 4], [6, 7, 9, 10]], [2, 4]),
        ([1, 0], [2, 3], [[0, 1], [6, 7]], [2, 2]),  # a row that reads nothing asks for nothing
    ],
)
def test_a_smaller_call_gives_the_same_where_it_computes(count, width, fed, positions):
    last, options = jnp.maximum(jnp.array(count) - 1, 0), {"width": jnp.array(width), "widths": (2,)}
    call, calls = called(Recorder(), star(*count), read=lambda x: Reading(x, x[:, -1], kept=last), **options)
    ran, each = np.zeros((2, 2, 3)), max(w for n, w in zip(count, width, strict=True) if n)
    ran[:, : max(count), :each] = np.array(fed).reshape(2, -1, each)
    assert len(calls) == 4 and call.positions.tolist() == positions
    assert call.one[..., 0].tolist() == ran[:, max(count) - 1].tolist()
    assert call.kv.tokens.tolist() == [row[i].tolist() for row, i in zip(ran, last, strict=True)]
    ran[np.arange(2) >= np.array(count)[:, None]] = 0  # the windows that a row does not read
    assert call.each[..., 0].tolist() == ran.tolist()


@pytest.mark.parametrize(
    ("parent", "row", "sees"),
    [
        ([-1, -1, -1], None, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ([-1, 0, 1], None, [[0, 0, 0], [3, 0, 0], [3, 3, 0]]),
        ([-1, 0, 0], [0, 0, 1], [[0, 0, 0], [1, 0, 0], [2, 0, 0]]),
        ([-1, 0, 1], [0, 1, 0], [[0, 0, 0], [2, 0, 0], [2, 1, 0]]),
    ],
    ids=["roots", "chain", "comb", "path"],
)
def test_a_window_sees_its_ancestors_up_to_the_row_where_its_path_leaves(parent, row, sees):
    shape = jnp.zeros((1, 3, 3), jnp.int32)
    windows = Windows(shape, shape[..., 0], shape[..., 0] == 0, jnp.array(parent), row and jnp.array(row))
    assert windows.sees().tolist() == sees
    by_row = dataclasses.replace(windows, parent=jnp.array([parent, [-1, -1, -1]]))
    assert by_row.sees().tolist() == [sees, np.zeros((3, 3)).tolist()]


CHILD = jnp.array([[20, 21, 22], [23, 24, 25]])


@pytest.mark.parametrize(
    ("reads", "parent", "whole", "positions"),
    [
        ([[1, 1, 1], [1, 0, 0]], [1, 0], True, [9, 3]),
        ([[1, 0, 1], [1, 0, 0]], [0, 0], False, [6, 3]),
        ([[1, 0, 0], [1, 0, 0]], [0, 0], False, [3, 3]),
        ([[1, 1, 0], [1, 0, 0]], [0, 0], False, [6, 3]),
    ],
)
def test_a_window_follows_another_one_of_each_row(reads, parent, whole, positions):
    """Two states of a block, and the next block after one of them, where any row reads it."""
    reads, parent = jnp.array(reads) > 0, jnp.array(parent)
    tokens = jnp.concatenate([FED, CHILD[:, None]], axis=1)
    windows = Windows(
        tokens,
        AT[:, None] + jnp.array([0, 0, 3]),
        reads,
        jnp.concatenate([jnp.full((2, 2), -1), parent[:, None]], axis=1),
    )
    smaller = ((0,), (0, 2), (0, 1))
    keeps = functools.partial(Reading, kept=parent)
    call, calls = called(InBlocks(), windows, read=keeps, smaller=smaller)
    assert [inputs.shape[1] for inputs, *_ in calls] == [3, 6, 6, 9]
    assert call.positions.tolist() == positions
    want = jnp.where(reads[..., None], tokens, 0)
    assert call.each[..., 0].tolist() == want.tolist()
    kept = [tokens[row, index].tolist() for row, index in enumerate(parent)]
    assert call.kv.tokens.tolist() == kept
    if whole:
        _, [(_, places, mask)] = called(InBlocks(), windows, bounded=True)
        assert mask[0, ::3, ::3].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
        assert mask[1, ::3, ::3].tolist() == [[True, False, False], [False, True, False], [True, False, True]]
        assert places[1].tolist() == [7, 8, 9, 7, 8, 9, 10, 11, 12]


def test_only_new_candidates_are_verified():
    draft = jnp.array([[1, 2]])
    candidates = jnp.array([[[1, 2], [3, 4], [5, 6], [3, 4], [7, 8], [9, 9]]])
    valid = jnp.array([[True, True, False, True, True, True]])

    def chosen(count: int, valid=valid):
        return distinct(draft, candidates, valid, count)[0].tolist()

    assert chosen(3) == [[1, 2], [3, 4], [7, 8]]
    assert chosen(6) == [[1, 2], [3, 4], [7, 8], [9, 9], [1, 2], [1, 2]]
    # One that does not count hides no equal one after it.
    assert chosen(3, valid.at[0, 1].set(False)) == [[1, 2], [3, 4], [7, 8]]
    assert chosen(7, jnp.zeros_like(valid)) == [[1, 2]] * 7


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


@pytest.mark.slow
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
    shapes = [(1, 4), (1, 8), (3, 4), (3, 8)]
    count, width = (
        jnp.where(jnp.array(running) > 0, x, 0) for x in (jnp.array([1, 2, 1]), jnp.array([5, 4, 3]))
    )
    fits = jnp.stack([(count <= r) & (width <= w) for r, w in shapes], axis=1)
    found = on_smallest(jnp.asarray, shapes, fits)
    assert tuple(found.tolist()) == shape
    assert on_smallest(lambda shape: shape, shapes[:1], fits[:, :1]) == (1, 4)


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


@over(SPARING, SPARING.keys() - {"candidates"})
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
    monkeypatch.setattr(tree, "on_smallest", lambda call, shapes, fits: call(shapes[-1]))
    whole, large = computed(name)
    assert whole == spared and sum(small) < sum(large)


def test_prompt_lookup_without_a_match_computes_one_position():
    ran: list = []
    prompt, drafts = [3, 1, 4], 3
    decoder = PromptLookup(Measured(probe=ran.append), 48, max_ngram=2, num_pred=drafts, min_ngram=1)
    result = run(decoder, None, tiny_request(30, prompts=[prompt]))
    jax.effects_barrier()
    sizes = sorted(size for size in ran if isinstance(size, int))
    assert set(sizes) == {1, 1 + decoder.num_short, 1 + drafts, len(prompt)}
    assert sum(sizes) == int(result.positions[0])
