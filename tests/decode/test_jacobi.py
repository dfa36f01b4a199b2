"""Jacobi decoding against plain Python on a stub: every leaf of its state, the end of its window,
its pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jacobi import plain_row, uniforms_of
from stubs import PROMPTS, StubCausal, tiny_request

from paradec_jax import decode
from paradec_jax.decode import Reason
from paradec_jax.decode.causal.recycling import EMPTY, after_token
from paradec_jax.decode.machine import rows as machine

COUNTING = StubCausal(weights=(1, 0), slope=0)  # the next token is one more
REPEATING = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)  # the text has period 3
LONG = 32


def state_and_commits(state, info):
    """Records the next call's state and how many tokens this one committed."""
    return state, info.committed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stub", "options", "spawn"),
    [
        (REPEATING, {"block": 5}, None),
        (REPEATING, {"block": 4, "candidates": 3}, None),
        (COUNTING, {"block": 6, "running": True, "pool": 2, "candidates": 5}, None),
        (REPEATING, {"block": 4, "blocks": 3, "pool": 2}, None),
        (COUNTING, {"block": 5, "blocks": 2, "pool": 1, "candidates": 3}, 0.6),
        (REPEATING, {"block": 3, "blocks": 3}, 0.0),
    ],
)
def test_every_leaf_is_that_of_plain_python(stub, options, spawn):
    decoder = decode.Jacobi(stub, LONG + 5, **options)
    request = tiny_request(LONG, seed=3)
    result, (states, commits) = decode.trace(
        decoder, None, request, decoder.Knobs(spawn=spawn), n=LONG, record=state_and_commits
    )
    states = jax.tree.map(
        np.asarray, dataclasses.replace(states, rows=dataclasses.replace(states.rows, keys=()))
    )
    commits, saved = np.asarray(commits), 0
    for i, prompt in enumerate(PROMPTS):
        plain = plain_row(
            {**options, **({} if spawn is None else {"spawn": spawn})}, stub, i, seed=3
        )
        for step in range(LONG):
            before = len(plain.text)
            plain.step()
            if len(plain.text) >= len(prompt) + LONG:
                break
            of_row = jax.tree.map(lambda x, at=(step, i): x[at], states)
            same_leaves(of_row, plain, uniforms_of(i, 3))
            assert commits[step, i] == len(plain.text) - before
        assert (states.rows.length[step:, i] == len(prompt) + LONG).all()
        assert (plain.calls, plain.positions) == (result.network_calls[i], result.positions[i])
        assert (
            result.completions()[i]
            == plain.text[len(prompt) :][:LONG]
            == stub.expected(prompt, LONG)
        )
        saved += LONG - plain.calls
    assert saved > 0


def same_leaves(state, plain, uniforms) -> None:
    """A row's state after a call, and that of the plain program; what it does not use is empty or a
    repetition.
    """
    length, rows = len(plain.text), state.rows
    assert (rows.length, rows.reason, rows.tokens[:length].tolist()) == (
        length,
        Reason.RUNNING,
        plain.text,
    )
    assert rows.counts == {"network_calls": plain.calls, "positions": plain.positions}
    assert state.cache.tokens[: length - 1].tolist() == plain.text[:-1]
    assert state.cache.positions[: length - 1].tolist() == list(range(length - 1))
    some = len(plain.drafts)
    assert state.candidates[:some].tolist() == plain.drafts
    assert (state.candidates[some:] == state.candidates[0]).all()
    assert state.window_end == plain.end
    some = len(plain.iterates)
    assert state.pool[:some].tolist() == plain.iterates and (state.pool[some:] == EMPTY).all()
    np.testing.assert_array_equal(state.uniforms, uniforms[: len(state.uniforms)])


# Where the window ends


def ends(length, old, agrees, at, spawn=None, **sizes) -> list[int]:
    """`next_end` of rows with prompts of 3 tokens."""
    length, old, at = (
        jnp.broadcast_to(jnp.asarray(x, jnp.int32), len(length)) for x in (length, old, at)
    )
    request = decode.make_request([[1, 2, 3]] * len(length), max_new_tokens=99)
    rows = dataclasses.replace(machine.begin(request, 110, 0), length=length)
    decoder = decode.Jacobi(**sizes)
    agrees = jnp.broadcast_to(jnp.asarray(agrees, bool), (len(length), decoder.width - 1))
    return decoder.next_end(rows, at, old, agrees, spawn).tolist()


def spawned(length, old, agreed, spawn, **sizes) -> list[int]:
    """`next_end` where so many tokens of the newest block agree, which begins with the first guess."""
    old, agreed = np.broadcast_arrays(old, agreed)
    agrees = np.arange(sizes["block"] * sizes["blocks"] - 1) < agreed[:, None]
    return ends(length, old, agrees, at=old - sizes["block"] - 1, spawn=spawn, **sizes)


def test_a_running_window_is_always_full():
    assert ends([4, 5, 9], 7, False, at=3, block=4, running=True) == [7, 8, 12]


def test_a_window_of_one_block_ends_with_the_block_of_the_newest_token():
    """Blocks begin at 3, 7, 11; the newest token stands at length - 1."""
    for agrees in (False, True):
        assert ends([4, 7, 8, 11, 12], 7, agrees, at=3, block=4) == [7, 7, 11, 11, 15]


def test_blocks_in_flight_are_spawned_one_by_one():
    sizes = {"block": 4, "blocks": 3}
    assert spawned([4] * 5, 7, [0, 1, 2, 3, 4], 0.5, **sizes) == [7, 7, 11, 11, 11]
    assert spawned([4] * 5, 7, [0, 1, 2, 3, 4], 1.0, **sizes) == [7, 7, 7, 7, 11]
    assert spawned([4] * 2, 15, [0, 4], 0.5, **sizes) == [15, 15]  # all are in flight
    # none, one, two were in flight
    assert spawned([8] * 3, [7, 11, 15], 0, 0.5, **sizes) == [
        11,
        11,
        15,
    ]
    assert spawned([4, 8], [3, 3], 0, 0.0, **sizes) == [15, 19]  # all, from the start


def test_a_share_of_a_block_is_not_rounded_up():
    """In float32 0.6 * 25 is more than 15."""
    assert spawned([4] * 3, 28, [14, 15, 16], jnp.float32(0.6), block=25, blocks=2) == [28, 53, 53]


def test_the_newest_block_counts_committed_tokens_and_the_guesses_that_agree_after_them():
    """Blocks of 4 that end at 7 and at 11; the newest token stands at 4, guesses from 5 on."""
    agrees = np.array([[1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0]], bool)

    def agreed(end: int) -> list[int]:
        """How many quarters of the block are enough to spawn the next one."""
        inside = np.pad(agrees & (5 + np.arange(6) < end), ((0, 0), (0, 5)))
        found = [
            ends([6] * 3, end, inside, 4, spawn=k / 4, block=4, blocks=3) for k in (1, 2, 3, 4)
        ]
        return (np.array(found) > end).sum(axis=0).tolist()

    assert (agreed(7), agreed(11)) == ([4, 3, 2], [1, 2, 0])


# What the pool gives


def recycled(*iterates: list[int], token: int, draft: tuple[int, ...]):
    """Candidates of several iterates, and whether they count."""
    lists = jax.vmap(after_token, in_axes=(0, None, None))
    candidates, valid = lists(jnp.array(iterates), jnp.int32(token), jnp.array(draft))
    return candidates.tolist(), valid.tolist()


def test_a_candidate_stood_after_the_first_occurrence():
    candidates, valid = recycled([5, 1, 2, 1, 3], [1, 1, 4, 4, 4], token=1, draft=(7, 8))
    assert candidates == [[2, 1], [1, 4]] and valid == [True, True]


def test_the_draft_completes_a_candidate():
    candidates, valid = recycled([5, 6, 0, 1, 3], [5, 6, 1, 9, 3], token=1, draft=(7, 8, 9))
    assert candidates == [[3, 8, 9], [9, 3, 9]] and valid == [True, True]


def test_an_iterate_without_the_token_gives_nothing():
    """Nor does one that ends with it, nor one that was never there."""
    iterates = [5, 6, 0, 2, 3], [5, 6, 7, 8, 1], [EMPTY] * 5
    assert recycled(*iterates, token=1, draft=(7, 8))[1] == [False] * 3
    assert recycled(*iterates, token=EMPTY, draft=(7, 8))[1] == [False] * 3


def test_when_blocks_are_spawned_is_half_a_block_by_default():
    """It means nothing to a single block."""
    several, one = decode.Jacobi(REPEATING, 9, blocks=2), decode.Jacobi(REPEATING, 9)
    assert several.knobs(None).spawn == several.knobs(several.Knobs(spawn=0.5)).spawn == 0.5
    assert one.knobs(None).spawn is None
