"""Drafts against predictions: which draft wins, and how much of it is accepted."""

import jax.numpy as jnp

from paradec_jax.decode.machine.verify import accept


def test_the_first_of_the_drafts_that_agree_longest_wins():
    drafts = jnp.array([[[5, 6, 9], [5, 6, 7], [5, 6, 7]], [[3, 4, 5], [2, -1, -1], [-1, 4, 5]]])
    predictions = jnp.array([[[5, 6, 7, 1]] * 3, [[2, 4, 5, 1]] * 3])
    winner, accepted, agrees = accept(drafts, predictions)
    assert (winner.tolist(), accepted.tolist()) == ([1, 1], [3, 1])
    assert agrees[1].tolist() == [[False, True, True], [True, False, False], [False, True, True]]
