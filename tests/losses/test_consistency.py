"""The consistency loss: its teacher, what counts, means; recorded arrays have its definition."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from stubs.tiny import drawn

from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.families import init_params
from paradec_jax.losses import MULTIBLOCK, ConsistencyRules, consistency_loss
from paradec_jax.losses.consistency import counted_pairs
from paradec_jax.models import TransformerNetwork

CONFIG = CAUSAL_PRESETS["test-causal"]
NETWORK = TransformerNetwork(CONFIG)
STOP, PAD = 1, 0
SPEC = TokenSpec(stop=(STOP,), pad=PAD)
SHAPE = (3, 5, 3, 4)  # B, P, T, n


@functools.cache
def params(seed: int = 2):
    """Random parameters, large enough for distributions far from uniform."""
    return drawn(init_params, CONFIG, seed, 3.0)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Unequal prompts and numbers of pairs; noisy copies differ from an offset on; one row ends in
    a stop token.
    """
    rng = np.random.default_rng(seed)
    rows, width, pairs, block = SHAPE
    clean = rng.integers(2, CONFIG.vocab_size, (rows, pairs, block))
    wrong = rng.integers(2, CONFIG.vocab_size, clean.shape)
    noisy = np.where(np.arange(block) < rng.integers(0, block + 1, (rows, pairs, 1)), clean, wrong)
    clean[1, 1, 1] = STOP
    noisy[0, 0, -1] = PAD
    return {
        "prompt": rng.integers(2, CONFIG.vocab_size, (rows, width)).astype(np.int32),
        "prompt_lengths": np.asarray([5, 2, 3], np.int32),
        "noisy": noisy.astype(np.int32),
        "clean": clean.astype(np.int32),
        "pairs": np.asarray([3, 2, 1], np.int32),
    }


@functools.cache
def graded(rules: ConsistencyRules):
    loss = consistency_loss(NETWORK, SPEC, rules)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(rules=MULTIBLOCK, data=None, *, frozen=None):
    data = batch() if data is None else data
    (loss, terms), grads = graded(rules)(params(), frozen, data, jax.random.key(0))
    return float(loss), {name: float(value) for name, value in terms.items()}, grads


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=2e-6)
    assert one[1] == pytest.approx(other[1], rel=1e-5, abs=1e-6)
    for a, b in zip(jax.tree.leaves(one[2]), jax.tree.leaves(other[2]), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * max(float(np.abs(b).max()), 1))


def test_a_frozen_teacher():
    same, frozen = run(), dataclasses.replace(MULTIBLOCK, teacher="frozen")
    assert_same(same, run(frozen, frozen=params()))
    assert run(frozen, frozen=params(1))[1]["consistency"] != pytest.approx(
        same[1]["consistency"], rel=1e-2
    )


def test_what_counts_after_a_stop_token():
    # STOP at offset 1 of the last of 2 blocks
    row = {name: values[1:2] for name, values in batch().items()}
    row["noisy"] = np.full_like(row["noisy"], 5)
    row["clean"] = np.where(row["clean"] == 5, 6, row["clean"])
    kept = {
        how: counted_pairs(row, SPEC, ConsistencyRules(after_eos=how))
        for how in ("pad", "keep", "drop")
    }
    answer = {
        how: pairs.block_weight[0].reshape(3, 4).astype(int).tolist() for how, pairs in kept.items()
    }
    assert answer["pad"] == answer["keep"] == answer["drop"] == [[1] * 4, [1, 1, 0, 0], [0] * 4]
    offsets = {how: pairs.keep[0].reshape(3, 4).astype(int).tolist() for how, pairs in kept.items()}
    assert offsets["pad"] == offsets["keep"] == [[1] * 4, [1] * 4, [0] * 4]
    assert offsets["drop"] == [[1] * 4, [1, 0, 0, 0], [0] * 4]
    assert kept["pad"].clean[0].reshape(3, 4)[1].tolist() == [row["clean"][0, 1, 0], STOP, PAD, PAD]
    assert (kept["keep"].clean == row["clean"].reshape(1, -1)).all()
    row["clean"][0, 0, 3] = STOP  # now the first block ends the answer
    ended = counted_pairs(row, SPEC, ConsistencyRules(after_eos="drop"))
    assert ended.valid.tolist() == [1]
    assert ended.keep[0].reshape(3, 4)[1:].sum() == 0


@pytest.mark.slow
def test_means_over_the_batch():
    data = batch()
    over = dataclasses.replace(MULTIBLOCK, over="batch", divide_by_pairs=False)
    single = [{name: values[row : row + 1] for name, values in data.items()} for row in range(3)]
    rows = [run(dataclasses.replace(over, over="row"), row)[1] for row in single]
    pairs = [counted_pairs(row, SPEC, over) for row in single]
    kept = [int(p.keep.sum()) for p in pairs]
    said = [int(p.block_weight.sum() + p.prompt_weight.sum()) for p in pairs]
    got = run(over, data)[1]
    assert got["consistency"] == pytest.approx(
        np.average([r["consistency"] for r in rows], weights=kept), rel=1e-5
    )
    assert got["ar"] == pytest.approx(np.average([r["ar"] for r in rows], weights=said), rel=1e-5)
    shorter = run(dataclasses.replace(over, divide_by_pairs=True), data)[1]
    assert shorter["consistency"] == pytest.approx(
        got["consistency"] / data["pairs"].sum(), rel=1e-5
    )
