"""Stored trajectories: round trips, stopped writers, damaged folders; noisy iterates; batches of
pairs.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.data.pairs import (
    MAX_TOKENS,
    PairBucket,
    Selection,
    collate,
    noise_ratio,
    pair_batches,
    worth_training,
)
from paradec_jax.data.trajectories import Generation, Trajectories, append, claim
from paradec_jax.families import init_params
from paradec_jax.losses import cllm_loss, consistency_loss
from paradec_jax.models import TransformerNetwork

N = 4
SEED = {"seed": 3}


def generation(index: int) -> Generation:
    rng = np.random.default_rng(index)
    prompt = rng.integers(2, 30, rng.integers(1, 7)).astype(np.int32)
    blocks = [
        rng.integers(2, 30, (rng.integers(1, 6), N)).astype(np.int32)
        for _ in range(rng.integers(1, 5))
    ]
    length = N * len(blocks) - (1 if index % 2 else 0)  # some end before their last block does
    return Generation(100 + index, prompt, blocks, length)


@pytest.fixture
def folder(tmp_path):
    claim(tmp_path / "run", N, SEED)
    for shard in range(0, 4), range(4, 8), range(8, 10):
        append(tmp_path / "run", map(generation, shard))
    return tmp_path / "run"


def plain(item: Generation) -> tuple:
    return (
        item.id,
        item.length,
        item.prompt.tolist(),
        [iterates.tolist() for iterates in item.iterates],
    )


# Storage


def test_round_trip(folder):
    append(folder, [Generation(7, np.ones(3, np.int32), [], 0)])  # decoded, without a block
    stored = Trajectories(folder)
    assert len(stored) == 10 and stored.block == N
    assert sorted(path.name for path in folder.iterdir())[:2] == ["index.json", "shard-00000.npy"]
    assert [*map(plain, stored)] == [plain(generation(i)) for i in range(10)]
    assert stored.ids.tolist() == [100 + i for i in range(10)]
    assert stored.decoded == {7, *stored.ids}
    assert stored.prompt_lengths.tolist() == [len(generation(i).prompt) for i in range(10)]
    assert stored.block_counts.tolist() == [len(generation(i).iterates) for i in range(10)]


@pytest.mark.parametrize("moment", ["numpy.save", "os.replace"])
def test_a_stopped_writer_leaves_whole_shards(folder, monkeypatch, moment):
    """Stopped while a shard is written, or before it gets its name."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moment, killed)
        with pytest.raises(KeyboardInterrupt):
            append(folder, map(generation, range(10, 17)))
    assert len(Trajectories(folder)) == 10
    claim(folder, N, SEED)
    append(folder, map(generation, range(10, 17)))
    assert [*map(plain, Trajectories(folder))] == [plain(generation(i)) for i in range(17)]


def test_another_collection_is_refused(folder):
    with pytest.raises(ValueError, match="was written with block 4, not 8"):
        claim(folder, 8, SEED)
    with pytest.raises(ValueError, match="was written with settings"):
        claim(folder, N, {"seed": 4})


def damage(folder, how: str):
    index, shard = json.loads((folder / "index.json").read_text()), folder / "shard-00001.npy"
    data = bytearray(shard.read_bytes())
    if how == "cut":
        shard.write_bytes(data[:-8])
    elif how in ("header", "counts", "digest"):
        place = data.index(generation(4).iterates[0].tobytes()) - 4 * len(generation(4).prompt) - 4
        data[{"header": data.index(b"i4"), "counts": place, "digest": -1}[how]] ^= 1
        shard.write_bytes(data)
    elif how == "swapped":
        shutil.copy(folder / "shard-00000.npy", shard)
    elif how == "lacking":
        shard.unlink()
    elif how == "version":
        index["format_version"] = 9
    (folder / "index.json").write_text("{" if how == "json" else json.dumps(index))
    if how == "missing":
        (folder / "index.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "shard-00001.npy cannot be read"),
        ("header", "shard-00001.npy"),
        ("counts", "shard-00001.npy is damaged"),
        ("digest", "shard-00001.npy is damaged"),
        ("swapped", "shard-00001.npy is damaged, or of another run"),
        ("lacking", "lacks shard-00001.npy"),
        ("version", "format version 9; this program reads 5"),
        ("json", "index.json is not valid JSON"),
        ("missing", r"index\.json"),
    ],
)
def test_damaged_folders(folder, how, message):
    damage(folder, how)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        Trajectories(folder)
    assert "\n" not in str(caught.value)


# Noisy iterates

POINTS = np.array([[1, 9, 9, 9], [1, 2, 9, 9], [9, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 4]], np.int32)


def test_ratio_and_schedules():
    assert noise_ratio(POINTS).tolist() == [0.75, 0.5, 1.0, 0.25, 0.0]
    rng = np.random.default_rng(0)
    assert Selection(window=5).targets(5, rng).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert Selection(window=3, order="reverse").targets(3, rng).tolist() == [1, 0.5, 0]
    assert Selection(window=3).targets(5, rng).tolist() == [0, 0.5, 1, 0, 0.5]
    assert Selection(window=3).targets(2, rng, first=4).tolist() == [0.5, 1]
    drawn = Selection(window=3, order="random").targets(100, rng)
    assert set(drawn) == {0, 0.5, 1} and drawn[:3].tolist() != [0, 0.5, 1]
    item = Generation(0, np.ones(1, np.int32), [POINTS] * 50, 50 * N)
    # never the fixed point
    assert set(Selection(order="uniform").chosen(item, rng)) == {
        0,
        1,
        2,
        3,
    }
    assert Selection(window=2).chosen(item, rng)[:3].tolist() == [4, 2, 4]


def test_filters():
    prompt, other = np.ones(3, np.int32), np.ones(4, np.int32)
    same, text = np.full((1, N), 5, np.int32), np.arange(N, dtype=np.int32)[None] + 2
    items = [
        Generation(0, prompt, [text], N),
        Generation(1, other, [same, same, same], 3 * N),
        Generation(2, prompt, [text], N),
        Generation(0, np.ones(MAX_TOKENS - 2 * N + 1, np.int32), [text], N),
    ]
    # twelve equal tokens, the first prompt again, one that is too long
    assert worth_training(items, stop=()).tolist() == [0]
    # what follows the stop token is not said
    assert worth_training(items, stop=(5,)).tolist() == [
        0,
        1,
    ]


# Batches


def pairs(folder, **changes):
    stored = Trajectories(folder)
    options = {"seed": 0, "batch_tokens": 256, "indices": np.arange(len(stored))}
    options |= {"selection": Selection(), "alone": False, "multiple": 1}
    return pair_batches(stored, **options | changes)


def test_an_epoch_shows_every_generation(folder):
    stored = Trajectories(folder)
    make = pairs(folder, seed=1, batch_tokens=3 * 2 * (8 + 4 * N)).make
    sources, seen = {generation(i).fixed.tobytes(): generation(i) for i in range(10)}, []
    for index in range(make.batches):
        bucket, data = make.plan(index)[0], make(index)
        assert data["noisy"].shape == (make.rows(bucket), bucket.pairs, N)
        assert data["prompt"].shape == (make.rows(bucket), bucket.prompt)
        for row, count in enumerate(data["pairs"]):
            source = sources[data["clean"][row, :count].tobytes()]
            np.testing.assert_array_equal(
                data["prompt"][row, : data["prompt_lengths"][row]], source.prompt
            )
            for block, noisy in zip(source.iterates, data["noisy"][row], strict=False):
                assert noisy.tolist() in block.tolist()
            seen.append(source.id)
    assert set(seen) == set(stored.ids.tolist()) and len(make.buckets) > 1
    epochs = [
        [make(k * make.batches + i)["prompt"].tolist() for i in range(make.batches)] for k in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    chosen = pairs(folder, indices=np.array([2, 5])).make
    prompts = {tuple(row[row > 0]) for i in range(chosen.batches) for row in chosen(i)["prompt"]}
    assert prompts == {tuple(generation(i).prompt) for i in (2, 5)}


def test_batches_say_where_their_padding_is():
    """By the length of the text, whatever token fills it up: here one that the text has too."""
    item = Generation(0, np.ones(1, np.int32), [np.full((2, N), 5, np.int32)] * 3, 2 * N + 1)
    for one, count, ends in (
        (item, 4, [4, 4, 1, 0]),
        (item.alone(1), 1, [4]),
        (item.alone(2), 1, [1]),
    ):
        batch = collate([(one, np.zeros(len(one.iterates), int))], PairBucket(9, count))
        wanted = (np.arange(N) < np.asarray(ends)[:, None])[None]
        assert (batch["noisy_real"] == wanted).all() and (batch["clean_real"] == wanted).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: pairs(folder, indices=[]), "no answer is left"),
        (lambda _: Selection(order="up"), "order must be one of linear"),
    ],
)
def test_refusals(folder, make, message):
    with pytest.raises(ValueError, match=message):
        make(folder)


@pytest.mark.parametrize("alone", [False, True])
def test_losses_read_the_batches(folder, alone):
    config = CAUSAL_PRESETS["test-causal"]
    network, spec = TransformerNetwork(config), TokenSpec(stop=(1,), pad=0)
    data = pairs(folder, selection=Selection(order="uniform"), alone=alone).make
    assert len(data.items) == (Trajectories(folder).block_counts.sum() if alone else 10)
    assert not alone or data(0)["noisy"].shape[1:] == (1, N)
    loss = (cllm_loss if alone else consistency_loss)(network, spec)
    value, terms = jax.jit(loss)(
        init_params(config, jax.random.key(0)), None, data(0), jax.random.key(0)
    )
    assert np.isfinite(float(value)) and float(terms["ar"]) > 1 and float(terms["consistency"]) > 0
