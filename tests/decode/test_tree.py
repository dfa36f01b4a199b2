"""One call on a small tree of windows: what each sees, how much of a call runs, decoders that
verify guesses.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from results import listed
from stubs import (
    PROMPTS,
    StubCausal,
    StubNetwork,
    tiny_causal,
    tiny_causal_params,
    tiny_network,
    tiny_params,
    tiny_request,
)
from stubs.base import TokenKV

from experiments.replicas import ReleasedMultiBlock
from paradec_jax.decode import Forward, Jacobi, PromptLookup, Static, run
from paradec_jax.decode.causal.recycling import distinct
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


FED, AT = jnp.arange(18).reshape(2, 3, 3), jnp.array([4, 7])


def called(network, windows, **options):
    """A call for two rows, with the arguments that the network was given."""
    Recorder.calls.clear()
    cache = network.init_cache(AT, 16)
    return forward_tree(network, None, Prefix(cache, AT), windows, **options), list(Recorder.calls)


@pytest.mark.parametrize("network", [Recorder(), InBlocks()])
@pytest.mark.parametrize(
    ("parent", "row", "sees"),
    [
        ([-1, -1, -1], None, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),  # star
        ([-1, 0, 1], None, [[0, 0, 0], [3, 0, 0], [3, 3, 0]]),  # chain
        ([-1, 0, 0], [0, 0, 1], [[0, 0, 0], [1, 0, 0], [2, 0, 0]]),  # comb
        ([-1, 0, 1], [0, 1, 0], [[0, 0, 0], [2, 0, 0], [2, 1, 0]]),
    ],
)
def test_a_window_sees_its_ancestors_up_to_the_row_where_its_path_leaves(
    parent, row, sees, network
):
    """The second row has a star, whose windows see nothing of each other."""
    at, parents = AT[:, None] + jnp.array([0, 0, 3]), jnp.array([parent, [-1] * 3])
    windows = Windows(FED, at, at > 0, parents, row and jnp.array(row))
    _, [(inputs, positions, masks)] = called(network, windows, bounded=True)
    assert inputs.tolist() == FED.reshape(2, 9).tolist()
    assert positions.tolist() == [[4, 5, 6] * 2 + [7, 8, 9], [7, 8, 9] * 2 + [10, 11, 12]]
    own = np.ones((3, 3)) if network.block else np.tri(3)
    others = np.repeat(np.arange(3) < np.array(sees)[..., None], 3, axis=0).reshape(9, 9)
    alone = np.kron(np.eye(3), own) > 0
    assert masks.tolist() == [(alone | others).tolist(), alone.tolist()]


@pytest.mark.parametrize(
    ("count", "width", "fed", "positions"),
    [
        ([1, 1], [2, 1], [[0, 1], [9, 10]], [2, 2]),
        ([1, 1], [3, 1], [[0, 1, 2], [9, 10, 11]], [3, 2]),
        ([1, 2], [2, 2], [[0, 1, 3, 4], [9, 10, 12, 13]], [2, 4]),
        ([1, 0], [2, 3], [[0, 1], [9, 10]], [2, 2]),  # a row that reads nothing asks for nothing
    ],
)
def test_a_smaller_call_gives_the_same_where_it_computes(count, width, fed, positions):
    last, options = (
        jnp.maximum(jnp.array(count) - 1, 0),
        {"width": jnp.array(width), "widths": (2,)},
    )
    windows = Windows.star(FED[:, :2], AT, jnp.array(count))
    call, calls = called(
        Recorder(), windows, read=lambda x: Reading(x, x[:, -1], kept=last), **options
    )
    ran, each = np.zeros((2, 2, 3)), max(w for n, w in zip(count, width, strict=True) if n)
    ran[:, : max(count), :each] = np.array(fed).reshape(2, -1, each)
    assert len(calls) == 4 and call.positions.tolist() == positions
    assert call.one[..., 0].tolist() == ran[:, max(count) - 1].tolist()
    assert call.kv.tokens.tolist() == [row[i].tolist() for row, i in zip(ran, last, strict=True)]
    ran[np.arange(2) >= np.array(count)[:, None]] = 0  # the windows that a row does not read
    assert call.each[..., 0].tolist() == ran.tolist()


@pytest.mark.parametrize(
    ("reads", "kept", "positions"),
    [
        ([[1, 1, 1], [1, 0, 0]], [1, 0], [9, 3]),
        ([[1, 0, 1], [1, 0, 0]], [2, 0], [6, 3]),
        ([[1, 1, 0], [1, 0, 0]], [0, 0], [6, 3]),
        ([[1, 0, 0], [1, 0, 0]], [0, 0], [3, 3]),
    ],
)
def test_a_call_computes_the_windows_that_a_row_reads(reads, kept, positions):
    reads, kept = jnp.array(reads) > 0, jnp.array(kept)
    windows = Windows(FED, AT[:, None] + 0 * reads, reads)
    keeps, smaller = functools.partial(Reading, kept=kept), ((0,), (0, 2), (0, 1))
    call, calls = called(InBlocks(), windows, read=keeps, smaller=smaller)
    assert [inputs.shape[1] for inputs, *_ in calls] == [3, 6, 6, 9]
    assert call.positions.tolist() == positions
    assert call.each[..., 0].tolist() == jnp.where(reads[..., None], FED, 0).tolist()
    assert call.kv.tokens.tolist() == FED[jnp.arange(2), kept].tolist()


# A comb: a short window after rows of another, each of its own length

TRUNK, TEETH = [5, 1, 8], [[2, 7], [4], [9, 3, 6]]
COMB = {
    "parent": jnp.array([-1, 0, 0, 0]),
    "row": jnp.array([0, 0, 1, 2]),  # the second tooth follows two tokens of the trunk
    "lengths": (3, 2, 1, 3),
}


def comb(network, params, prompts, kept, **marks):
    """What is read in a call on a comb after prompts, its positions, what is stored, and the cache
    after that.
    """
    lengths, most = np.array([len(prompt) for prompt in prompts]), max(map(len, prompts))
    padded = np.array([prompt + [0] * (most - len(prompt)) for prompt in prompts])
    fed = np.array([row + [0] * (3 - len(row)) for row in (TRUNK, *TEETH)])

    @jax.jit
    def call(params, padded, lengths):
        cache = network.init_cache(jnp.arange(len(prompts)), 24)
        positions = jnp.broadcast_to(jnp.arange(most), padded.shape)
        read = network.forward(params, padded, positions, Prefix(cache, None))
        cache = network.write(cache, read.kv, 0 * lengths)
        at = lengths[:, None] + jnp.array([0, 1, 2, 3])
        texts = jnp.broadcast_to(fed, (len(prompts), 4, 3))
        windows = Windows(texts, at, at > 0, **COMB, **marks)
        reads = functools.partial(Reading, kept=jnp.array(kept))
        called = forward_tree(network, params, Prefix(cache, lengths), windows, reads, bounded=True)
        return called.each, called.positions, called.kv, network.write(cache, called.kv, lengths)

    return call(params, padded, lengths)


@pytest.mark.parametrize(
    ("network", "params"),
    [(StubCausal(vocab_size=13), None), (tiny_causal(), tiny_causal_params())],
    ids=["stub", "transformer"],
)
def test_a_comb_says_what_a_call_on_each_path_says(network, params):
    """Each window costs its own tokens; the path that is kept is stored, and read on from."""

    @jax.jit
    def plain(text, prefix=None, at=0):
        positions = at + jnp.arange(text.shape[1])[None]
        return network.forward(params, text, positions, prefix).hidden[0]

    def alone(tokens):  # nothing sees what stands after it
        return np.asarray(plain(np.array([tokens + [0] * (12 - len(tokens))])))[: len(tokens)]

    prompts, kept = [[3, 1, 4], [1, 5, 2, 6]], [3, 1]
    each, positions, _, cache = comb(network, params, prompts, kept, path=6)
    assert positions.tolist() == [9, 9]
    for row, prompt in enumerate(prompts):
        paths = [prompt + TRUNK, *(prompt + TRUNK[:n] + TEETH[n - 1] for n in (1, 2, 3))]
        for said, path, size in zip(np.asarray(each[row]), paths, COMB["lengths"], strict=True):
            np.testing.assert_allclose(said[:size], alone(path)[-size:], atol=1e-5)
            assert not said[size:].any()
        path, own = paths[kept[row]], jax.tree.map(lambda x, row=row: x[row : row + 1], cache)
        end = np.array([len(path)])
        more = plain(np.array([[2]]), Prefix(own, end), end)
        np.testing.assert_allclose(more[0], alone([*path, 2])[-1], atol=1e-5)


def test_a_chain_is_stored_up_to_the_block_that_is_kept():
    reads = jnp.ones((2, 3), bool)
    windows = Windows(FED, AT[:, None] + 3 * jnp.arange(3), reads, jnp.array([-1, 0, 1]), path=9)
    kept = functools.partial(Reading, kept=jnp.array([1, 2]))
    call, _ = called(InBlocks(), windows, read=kept, bounded=True)
    assert call.kv.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0], list(range(9, 18))]
    assert call.kv.positions[1].tolist() == list(range(7, 16))


def test_what_is_not_stored_never_reaches_the_cache():
    """Masks after each row of a text: of the path that ends in them the text is handed on."""
    marks, prompts = {"stored": (True, False, False, False)}, [[3, 1, 4], [1, 5, 2, 6], [7, 7]]
    _, _, kv, _ = comb(StubCausal(vocab_size=13), None, prompts, [3, 1, 0], **marks)
    assert kv.tokens.tolist() == [[5, 1, 8], [5, 0, 0], [5, 1, 8]]
    assert kv.positions.tolist() == [[3, 4, 5], [4, 0, 0], [2, 3, 4]]


def test_only_new_candidates_are_verified():
    draft = jnp.array([[1, 2]])
    candidates = jnp.array([[[1, 2], [3, 4], [5, 6], [3, 4], [7, 8], [9, 9]]])
    valid = jnp.array([[True, True, False, True, True, True]])

    def chosen(count: int, valid=valid):
        return jax.jit(distinct, static_argnums=3)(draft, candidates, valid, count)[0].tolist()

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
    # the prompt with its drafts, then all candidates ..
    most = request.lengths + 3 + (calls - 1) * 3 * 4
    spared = most - found.positions  # .. but in the first call, whose candidates repeat the draft
    assert (spared % 8 == 0).all() and (spared >= 8).all() and (spared < (calls - 1) * 8).all()


@pytest.mark.slow
def test_a_candidate_wins_on_a_recurrent_network():
    """On a text whose next-best guess is never right candidates cost positions; with a pool they
    save calls.
    """
    network, request = StubNetwork(needed=(1,)), tiny_request(12)
    plain = run(Jacobi(network, 24, block=4), {}, request)
    more = run(Jacobi(network, 24, block=4, pool=3), {}, request)
    expected = [network.expected(prompt, 12) for prompt in ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))]
    assert plain.completions() == more.completions() == expected
    assert (more.network_calls <= plain.network_calls).all()
    assert (more.positions > plain.positions).all()


# What is not there is not computed


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
    # The pool remembers the whole width.
    "blocks and a pool": (Jacobi, {"block": 3, "blocks": 2, "pool": 1}, 6),
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
    """A row by itself pays for the positions that its calls computed, and the largest shape writes
    the same.
    """
    kind, _, smallest = SPARING[name]
    result, sizes = computed(name, alone=1)
    assert len(sizes) == result["network_calls"][0] and sizes[0] == smallest
    if kind is Jacobi:
        assert sum(sizes) == result["positions"][0]
    else:  # its window shrinks with the block, the compiled ones do not
        assert sum(sizes) > result["positions"][0]
    spared, small = computed(name)
    monkeypatch.setattr(tree, "on_smallest", lambda *of, bounded: on_smallest(*of, bounded=True))
    whole, large = computed(name)
    assert whole == spared and sum(small) < sum(large)


def test_prompt_lookup_without_a_match_computes_one_position():
    ran: list = []
    prompt, drafts = [3, 1, 4], 3
    decoder = PromptLookup(
        Measured(probe=ran.append), 48, max_ngram=2, num_pred=drafts, min_ngram=1
    )
    result = run(decoder, None, tiny_request(30, prompts=[prompt]))
    jax.effects_barrier()
    sizes = sorted(size for size in ran if isinstance(size, int))
    assert set(sizes) == {1, 2, 1 + drafts, len(prompt)}
    assert sum(sizes) == int(result.positions[0])
