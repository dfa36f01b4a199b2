"""Jacobi decoding against plain Python on a stub: every leaf of its state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from plain_jacobi import plain_row, uniforms_of
from stubs import PROMPTS, StubCausal, tiny_request

from paradec_jax import decode
from paradec_jax.decode import Reason
from paradec_jax.decode.causal.recycling import EMPTY
from paradec_jax.decode.machine import rows as machine

COUNTING = StubCausal(weights=(1, 0), slope=0)  # the next token is one more
REPEATING = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)  # the text has period 3
LONG = 32


def state_and_commits(state, info):
    """Records the next call's state and how many tokens this one committed."""
    return state, info.committed


@pytest.mark.parametrize(
    ("stub", "options", "spawn"),
    [
        slow(REPEATING, {"block": 5}, None),
        slow(REPEATING, {"block": 4, "candidates": 3}, None),
        (COUNTING, {"block": 6, "running": True, "pool": 2, "candidates": 5}, None),
        slow(REPEATING, {"block": 4, "blocks": 3, "pool": 2}, None),
        (COUNTING, {"block": 5, "blocks": 2, "pool": 1, "candidates": 3}, 0.6),
        slow(REPEATING, {"block": 3, "blocks": 3}, 0.0),
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


def same_leaves(state, plain, uniforms):
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


def test_a_share_of_a_block_is_not_rounded_up():
    """In float32 0.6 * 25 is more than 15; so many guesses that agree open the next block."""
    request = decode.make_request([[1, 2, 3]] * 3, max_new_tokens=99)
    rows = dataclasses.replace(machine.begin(request, 110, 0), length=jnp.full(3, 4))
    decoder, agrees = decode.Jacobi(block=25, blocks=2), np.arange(49) < [[14], [15], [16]]
    found = decoder.next_end(rows, jnp.full(3, 2), jnp.full(3, 28), agrees, jnp.float32(0.6))
    assert found.tolist() == [28, 53, 53]


def test_when_blocks_are_spawned_is_half_a_block_by_default():
    """It means nothing to a single block."""
    several, one = decode.Jacobi(REPEATING, 9, blocks=2), decode.Jacobi(REPEATING, 9)
    assert several.knobs(None).spawn == several.knobs(several.Knobs(spawn=0.5)).spawn == 0.5
    assert one.knobs(None).spawn is None
