"""Visibility rules as they are drawn."""

import jax.numpy as jnp
import numpy as np

from paradec_jax.nn import masks


def test_the_mask_of_lookahead_is_as_drawn():
    slots = jnp.array([[0, 0, 1, 1], [0, 0, 0, 0]]), jnp.array([[0, 1, 0, 1], [0, 1, 2, 3]])
    two_levels, one_level = np.asarray(masks.lookahead(*slots, 2, 2)).astype(int).tolist()
    guesses = [
        [1, 0, 0, 0, *own] for own in ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1])
    ]
    levels = [
        [*own, 0, 0, 0, 0] for own in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1])
    ]
    assert two_levels == [*levels, *guesses]
    assert one_level == [*[[1] * (i + 1) + [0] * (7 - i) for i in range(4)], *guesses]


# the second window begins inside a block of two
POSITIONS = jnp.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])


def drawn(mask) -> list[str]:
    """A mask [W, S] as docstrings draw it."""
    return [" ".join("x" if one else "." for one in row) for row in np.asarray(mask)]


def test_masks_of_blocks_are_as_drawn():
    first, second = masks.block_causal(POSITIONS, 2)
    assert drawn(first) == ["x x . . .", "x x . . .", "x x x x .", "x x x x .", "x x x x x"]
    assert drawn(second) == ["x . . . .", "x x x . .", "x x x . .", "x x x x x", "x x x x x"]
    (prompt,) = masks.block_causal(POSITIONS[:1], 2, 3)
    assert drawn(prompt) == ["x x x . .", "x x x . .", "x x x . .", "x x x x x", "x x x x x"]
    first, second = masks.block_diagonal(POSITIONS, 2)
    assert drawn(first) == ["x x . . .", "x x . . .", ". . x x .", ". . x x .", ". . . . x"]
    assert drawn(second) == ["x . . . .", ". x x . .", ". x x . .", ". . . x x", ". . . x x"]
    first, second = masks.strictly_before(POSITIONS, 2)
    assert drawn(first) == [". . . . .", ". . . . .", "x x . . .", "x x . . .", "x x x x ."]
    assert drawn(second) == [". . . . .", "x . . . .", "x . . . .", "x x x . .", "x x x . ."]
    assert drawn(masks.sliding(POSITIONS, 3)[1]) == ["x x x x x"] * 3 + [". x x x x", ". . x x x"]


def test_blocks_of_another_length_in_each_row():
    lengths = jnp.array([2, 4])
    for rule in (masks.block_causal, masks.block_diagonal, masks.strictly_before):
        both = rule(POSITIONS, lengths)
        for i, length in enumerate((2, 4)):
            np.testing.assert_array_equal(both[i], rule(POSITIONS[i : i + 1], length)[0])
            np.testing.assert_array_equal(both[i], rule(POSITIONS[i : i + 1], jnp.int32(length))[0])
    np.testing.assert_array_equal(masks.block_causal(POSITIONS[:1], 1)[0], masks.causal(5))
    assert masks.block_causal(POSITIONS[:1], 5).all()


def test_windows_side_by_side_are_as_drawn():
    sees = jnp.array([[0, 0, 0], [2, 0, 0], [1, 0, 0]])
    whole = ["x x x . . .", "x x x . . .", "x x x . . .", "x x . x . .", *["x . . . x x"] * 2]
    assert drawn(masks.windows((3, 1, 2), sees, False)) == whole
    causal = ["x . . . . .", "x x . . . .", "x x x . . .", *whole[3:4], "x . . . x .", whole[5]]
    assert drawn(masks.windows((3, 1, 2), sees, True)) == causal
    first = jnp.arange(6)[None] < 3  # rows of the first window alone
    assert drawn(masks.windows((3, 1, 2), sees, first)[0]) == [*causal[:3], *whole[3:]]
