"""Noise of blocks: how much is hidden and how it is weighed, exact counts, and rows that are drawn
again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over

from paradec_jax.noise import BlockNoise, Hidden, choose
from paradec_jax.noise.blocks import KINDS

ROWS, WIDTH = 4_000, 16
SAMPLES = np.broadcast_to(np.arange(WIDTH) // 8, (ROWS, WIDTH))
BLOCKS = np.broadcast_to(np.arange(WIDTH) // 4, (ROWS, WIDTH))
# 2 of the first block, 4 of the second
LABELLED = np.broadcast_to(np.arange(WIDTH) % 8 >= 2, (ROWS, WIDTH))


@functools.cache
def drawn(kind: str, again: bool):
    noise = BlockNoise(kind)
    draw = jax.jit(noise.draw if again else noise.once)
    return jax.tree.map(np.asarray, draw(jax.random.key(0), LABELLED, SAMPLES, BLOCKS))


@over(KINDS[:3], argument="kind")
def test_half_of_the_labelled_tokens_are_hidden_and_weigh_as_much_as_all(kind):
    where, probability = drawn(kind, again=False)
    assert not (where & ~LABELLED).any()
    share = where.sum() / LABELLED.sum()
    # A count is at least 1: (n + 1) / 2n of a block.
    wanted = (2 * 3 / 4 + 4 * 5 / 8) / 6 if kind == "count" else 0.5
    assert share == pytest.approx(wanted, abs=0.02)
    weights = np.where(where, 1 / probability, 0)
    assert weights.sum() / LABELLED.sum() == pytest.approx(1, abs=0.06)
    for block in range(4):  # and in each of them
        inside = np.equal(BLOCKS, block)
        assert weights[inside].sum() / LABELLED[inside].sum() == pytest.approx(1, abs=0.12)


@over(["sample", "block"], argument="kind")
def test_a_probability_is_shared_by_a_sample_or_a_block(kind):
    _, probability = drawn(kind, again=False)
    size = 8 if kind == "sample" else 4
    groups = probability.reshape(ROWS, -1, size)
    assert (groups == groups[..., :1]).all() and (groups[:, 0, 0] != groups[:, 1, 0]).mean() > 0.99
    assert 1e-3 <= probability.min() < 0.01 and 0.99 < probability.max() <= 1


def test_counts_are_exact_and_evenly_spread():
    where, probability = drawn("count", again=False)
    for block, n in enumerate((2, 4, 2, 4)):
        inside = slice(4 * block, 4 * block + 4)
        counts = where[:, inside].sum(axis=1)
        found = np.bincount(counts, minlength=n + 1)
        assert found[0] == 0 and len(found) == n + 1
        np.testing.assert_allclose(found[1:] / ROWS, 1 / n, atol=0.04)
        np.testing.assert_allclose(
            probability[:, inside], np.tile(counts[:, None] / n, 4), rtol=1e-6
        )
        # No place is preferred.
        places = where[:, inside][:, LABELLED[0, inside]].mean(axis=0)
        np.testing.assert_allclose(places, places.mean(), atol=0.04)


def test_a_row_without_a_hidden_token_is_drawn_again_and_at_last_forced():
    one = np.zeros((ROWS, WIDTH), bool)
    one[:, 5] = True
    noise = BlockNoise()
    once = jax.jit(noise.once)(jax.random.key(1), one, SAMPLES, BLOCKS)
    again = jax.tree.map(np.asarray, jax.jit(noise.draw)(jax.random.key(1), one, SAMPLES, BLOCKS))
    assert np.asarray(once.where)[:, 5].mean() == pytest.approx(0.5, abs=0.04)
    assert again.where[:, 5].all() and again.where.sum() == ROWS
    # The level is drawn again too: among the hidden ones it is 2p dp, as in rows that were hidden
    # at once.
    assert again.probability[:, 5].mean() == pytest.approx(2 / 3, abs=0.02)


@over([(0, False), (1, False), (10, False), (11, True)], argument="draw, forced")
def test_ten_draws_follow_the_first_and_then_one_labelled_token_is_forced(
    draw, forced, monkeypatch
):
    """Of a noise that hides everything in one of its draws and nothing in the others."""
    key = jax.random.key(0)

    def once(self, drawn, labelled, samples, blocks, groups):
        del self, samples, blocks
        wanted = jax.random.key_data(jax.random.fold_in(key, draw))
        hit = jnp.all(jax.random.key_data(drawn) == wanted)
        return Hidden(labelled & hit, jnp.full(labelled.shape, 0.25))

    monkeypatch.setattr(BlockNoise, "once", once)
    where, probability = jax.tree.map(
        np.asarray, BlockNoise().draw(key, *map(jnp.asarray, (LABELLED, SAMPLES, BLOCKS)))
    )
    assert not (where & ~LABELLED).any() and (probability == 0.25).all()
    np.testing.assert_array_equal(where.sum(axis=1), 1 if forced else 12)
    if forced:
        np.testing.assert_allclose(where.mean(axis=0)[LABELLED[0]], 1 / 12, atol=0.03)


@over(KINDS, argument="kind")
def test_a_row_without_labels_stays_as_it_is(kind):
    labelled = LABELLED[:4].copy()
    labelled[1] = False
    where, _ = jax.jit(BlockNoise(kind).draw)(jax.random.key(0), labelled, SAMPLES[:4], BLOCKS[:4])
    assert np.asarray(where).any(axis=1).tolist() == [True, False, True, True]


def test_what_is_no_noise_is_refused():
    with pytest.raises(
        ValueError, match="kind must be one of sample, block, count, group, not 'row'"
    ):
        BlockNoise("row")


@over([(1,), (2,), (1, 3)], argument="counts")
def test_some_of_each_block_are_chosen(counts):
    """As many as one of the counts says, all alike, whatever the other blocks hold."""
    rows = 4000
    still = jnp.broadcast_to(jnp.asarray([1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0], bool), (rows, 12))
    blocks = jnp.broadcast_to(jnp.arange(12) // 4, (rows, 12))
    chosen = np.asarray(jax.jit(choose)(jax.random.key(0), still, blocks, jnp.asarray(counts)))
    assert not (chosen & ~np.asarray(still)).any()
    of_first, of_second = chosen[:, :4].sum(1), chosen[:, 4:8].sum(1)
    assert set(of_first) == {min(c, 3) for c in counts} and set(of_second) == {1}
    share = np.mean([min(c, 3) / 3 for c in counts])
    found = chosen[:, [0, 1, 3]].mean(axis=0)
    assert (np.abs(found - share) < 4 * np.sqrt(0.25 / rows)).all()


def test_groups_are_consecutive_blocks_of_which_later_ones_hide_more():
    noise, at = BlockNoise("group", group=3), jnp.broadcast_to(jnp.arange(16), (ROWS, 16))
    blocks, positions, two = at // 2, at % 10, jnp.full(ROWS, 2)
    key, labelled = jax.random.key(0), jnp.ones((ROWS, 16), bool)
    groups = noise.groups(key, positions, two, blocks)
    _, probability = noise.draw(key, labelled, blocks, blocks, groups)
    groups = np.asarray(groups)
    same = groups[:, 2::2] == groups[:, :-2:2]  # as the block before
    assert not same[:, 4].any(), "a sample begins with a group of its own"
    sizes = {tuple(np.diff(np.flatnonzero(~row[:4]), prepend=-1)[1:]) for row in same}
    assert {size for row in sizes for size in row} == {2, 3}
    shares = np.asarray(probability)[:, ::2]
    assert (np.asarray(probability)[:, 1::2] == shares).all()
    rises = np.diff(shares, axis=1)
    assert (rises[same] >= 0).all() and (rises[same] > 0.01).mean() > 0.6
    assert (rises[~same] < 0).mean() > 0.5 and shares.min() >= 0.001 and shares.max() <= 1
    assert (np.asarray(BlockNoise().groups(key, positions, two, blocks)) == blocks).all()
