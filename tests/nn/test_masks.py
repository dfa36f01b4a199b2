"""Visibility rules as they are drawn."""

import jax.numpy as jnp
import numpy as np

from paradec_jax.nn import masks


def test_the_mask_of_lookahead_is_as_drawn():
    slots = jnp.array([[0, 0, 1, 1], [0, 0, 0, 0]]), jnp.array([[0, 1, 0, 1], [0, 1, 2, 3]])
    two_levels, one_level = np.asarray(masks.lookahead(*slots, 2, 2)).astype(int).tolist()
    guesses = [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
    ]
    assert two_levels == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        *guesses,
    ]
    assert one_level == [*[[1] * (i + 1) + [0] * (7 - i) for i in range(4)], *guesses]
