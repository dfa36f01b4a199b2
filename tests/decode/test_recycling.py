"""Candidates of Jacobi decoding: what the pool gives, repairs, and which of them are verified."""

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.decode.causal import recycling
from paradec_jax.decode.causal.recycling import EMPTY


def test_the_oldest_iterate_falls_out():
    pool = jnp.full((2, 2, 3), EMPTY, jnp.int32)
    for i in range(3):
        pool = recycling.push(pool, jnp.full((2, 3), i).at[1].add(10))
    assert pool.tolist() == [[[2] * 3, [1] * 3], [[12] * 3, [11] * 3]]
    nothing = jnp.zeros((2, 0, 3), jnp.int32)
    assert recycling.push(nothing, pool[:, 0]).shape == nothing.shape


def recycled(*iterates: list[int], token: int, draft: tuple[int, ...]):
    """Candidates and whether they count, of one row."""
    pool, token, draft = jnp.array([iterates]), jnp.array([token]), jnp.array([draft])
    candidates, valid = jax.jit(recycling.recycled)(pool, token, draft)
    return candidates[0].tolist(), valid[0].tolist()


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


def test_rows_have_pools_of_their_own():
    pool = jnp.array([[[1, 2, 3]], [[4, 1, 3]]])
    candidates, valid = recycling.recycled(pool, jnp.array([1, 4]), jnp.array([[8, 9], [6, 7]]))
    assert candidates.tolist() == [[[2, 3]], [[1, 3]]] and valid.all()


def test_repairs_are_the_next_best_first_guesses():
    logits = jnp.array([[0.1, 3.0, 2.0, -1.0, 2.5], [9.0, 1.0, 1.0, 2.0, 0.0]])
    draft = jnp.array([[1, 7, 7], [0, 8, 8]])
    repairs = recycling.alternatives(logits, draft, 3)
    assert repairs[:, :, 0].tolist() == [[4, 2, 0], [3, 1, 2]]
    np.testing.assert_array_equal(repairs[:, :, 1:], np.broadcast_to(draft[:, None, 1:], (2, 3, 2)))
    assert recycling.alternatives(logits, draft, 0).shape == (2, 0, 3)


def test_only_new_candidates_are_verified():
    draft = jnp.array([[1, 2]])
    candidates = jnp.array([[[1, 2], [3, 4], [5, 6], [3, 4], [7, 8], [9, 9]]])
    valid = jnp.array([[True, True, False, True, True, True]])

    def chosen(count: int, valid=valid):
        return recycling.distinct(draft, candidates, valid, count)[0].tolist()

    assert chosen(2) == [[3, 4], [7, 8]]
    assert chosen(5) == [[3, 4], [7, 8], [9, 9], [1, 2], [1, 2]]
    # One that does not count hides no equal one after it.
    assert chosen(2, valid.at[0, 1].set(False)) == [[3, 4], [7, 8]]
    assert chosen(6, jnp.zeros_like(valid)) == [[1, 2]] * 6
