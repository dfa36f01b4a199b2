"""The loss of block diffusion: packed samples, what they see, lengths of blocks, what carries
gradient.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import tiny_blocks, tiny_blocks_params

from paradec_jax.config import TokenSpec
from paradec_jax.losses import BlockRules, block_diffusion_loss
from paradec_jax.losses.block_diffusion import layout_of

MASK, BLOCK = 31, 4
SPEC = TokenSpec(mask=MASK, alignment="own")
CHOICES = {"layers": 2, "block": BLOCK}
NETWORK = tiny_blocks(**CHOICES)
POSITIONS = np.asarray([[*range(8), *range(12)], [*range(11), *range(4), 0, 0, 0, 0, 0]])
SAMPLES = np.asarray([[0] * 8 + [1] * 12, [0] * 11 + [1] * 4 + [2] * 5])
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 30, POSITIONS.shape),
    "labelled": (SAMPLES < 2) & (POSITIONS >= 1) & ((POSITIONS >= 3) | (SAMPLES == 1)),
    "positions": POSITIONS,
}
RECORDED = BATCH | {
    "hidden": BATCH["labelled"] & (np.random.default_rng(1).random(POSITIONS.shape) < 0.6),
    "probability": np.where(SAMPLES == 0, 0.5, 0.8).astype(np.float32),
}


def params_of():
    return tiny_blocks_params(0, 2.0, **CHOICES)


@functools.cache
def step_of(rules):
    objective = block_diffusion_loss(NETWORK, SPEC, rules)
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def graded(batch, rules=BlockRules()):  # noqa: B008
    (loss, metrics), grads = step_of(rules)(params_of(), None, batch, jax.random.key(0))
    return loss, metrics, grads


def test_samples_and_blocks_of_packed_rows():
    layout = jax.tree.map(np.asarray, layout_of(jnp.asarray(POSITIONS), BLOCK))
    np.testing.assert_array_equal(layout.samples, SAMPLES)
    np.testing.assert_array_equal(layout.positions[0], POSITIONS[0])
    np.testing.assert_array_equal(layout.positions[1, 15:], range(5))
    assert layout.blocks.tolist()[0] == [i // 4 for i in range(20)]
    assert layout.blocks.tolist()[1] == [*[0] * 4, *[1] * 4, *[2] * 3, *[3] * 4, *[4] * 4, 5]
    rows = layout_of(jnp.asarray([[0, 1, 2, 3], [0, 0, 1, 0]]), jnp.asarray([2, 4]))
    assert rows.blocks.tolist() == [[0, 0, 1, 1], [0, 1, 1, 2]]
    assert rows.samples.tolist() == [[0, 0, 0, 0], [0, 1, 1, 2]]
    empty = layout_of(jnp.zeros((1, 3), int), 2)
    assert empty.samples.tolist() == [[0, 0, 0]] and empty.positions.tolist() == [[0, 1, 2]]


@pytest.mark.slow
def test_rows_of_one_batch_have_blocks_of_several_lengths():
    """Where whole samples are hidden, longer blocks show less; drawn lengths give what the mean of
    them gives.
    """
    rows = 32
    batch = {
        "tokens": np.broadcast_to(BATCH["tokens"][:1, 8:], (rows, 12)),
        "labelled": np.broadcast_to(np.arange(12) > 0, (rows, 12)),
        "positions": np.broadcast_to(np.arange(12), (rows, 12)),
        "hidden": np.broadcast_to(np.arange(12) > 0, (rows, 12)),
        "probability": np.ones((rows, 12), np.float32),
    }
    short, long = (float(graded(batch, rules=BlockRules(blocks=(n,)))[0]) for n in (2, 6))
    mixed = float(graded(batch, rules=BlockRules(blocks=(2, 6)))[0])
    share = (mixed - long) / (short - long)
    assert abs(short - long) > 1e-2 and 0.2 < share < 0.8
    assert abs(share * rows - round(share * rows)) < 0.1


def test_the_clean_copy_learns_through_what_it_shows():
    """Hidden tokens of a second block: the embedding of clean tokens of the first has a gradient."""
    hidden = (SAMPLES == 0) & (POSITIONS >= 4) & (POSITIONS < 8) & (np.arange(2) == 0)[:, None]
    tokens = np.where((POSITIONS < 4) & (SAMPLES == 0), 7, 9)
    batch = BATCH | {"tokens": tokens, "hidden": hidden, "labelled": hidden}
    batch |= {"probability": np.ones(hidden.shape, np.float32)}
    _, _, grads = graded(batch)
    norms = np.linalg.norm(np.asarray(grads["embedding"]), axis=-1)
    assert norms[7] > 1e-4 and norms[MASK] > 1e-4 and norms[5] == 0


def test_a_loop_over_the_layers_of_both_forwards_changes_nothing():
    """The noisy forward too, whose cache is what the clean one kept."""
    network = tiny_blocks(**CHOICES, scan_layers=True, remat="layer")
    objective = block_diffusion_loss(network, SPEC)
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (loss, metrics), grads = step(params_of(), None, RECORDED, jax.random.key(0))
    chex.assert_trees_all_close((loss, metrics, grads), graded(RECORDED), rtol=2e-5, atol=1e-5)
