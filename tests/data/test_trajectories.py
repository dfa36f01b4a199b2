"""Stored trajectories: round trips, stopped writers, damaged folders; noisy iterates; batches of pairs."""

import json

import jax
import numpy as np
import pytest

from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.data.noisy_iterates import MAX_TOKENS, Selection, kept, longest_run, noise_ratio, pack
from paradec_jax.data.pair_batches import PairBucket, collate, pair_batches
from paradec_jax.data.trajectories import Generation, Trajectories, TrajectoryError, TrajectoryWriter
from paradec_jax.families import init_params
from paradec_jax.losses import cllm_loss, consistency_loss
from paradec_jax.models import TransformerNetwork

N = 4


def generation(index: int) -> Generation:
    rng = np.random.default_rng(index)
    prompt = rng.integers(2, 30, rng.integers(1, 7)).astype(np.int32)
    blocks = [
        rng.integers(2, 30, (rng.integers(1, 6), N)).astype(np.int32) for _ in range(rng.integers(1, 5))
    ]
    length = N * len(blocks) - (1 if index % 2 else 0)  # some end before their last block does
    return Generation(100 + index, prompt, blocks, length)


def write(folder, numbers, **options) -> None:
    with TrajectoryWriter(folder, block_size=N, **{"shard_size": 4, **options}) as writer:
        for index in numbers:
            writer.add(generation(index))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "run", range(10), settings={"seed": 3})
    return tmp_path / "run"


def assert_equal(one: Generation, other: Generation) -> None:
    assert one.data_id == other.data_id and one.text_length == other.text_length
    np.testing.assert_array_equal(one.prompt, other.prompt)
    assert len(one.iterates) == len(other.iterates)
    for a, b in zip(one.iterates, other.iterates, strict=True):
        np.testing.assert_array_equal(a, b)


# Storage


def test_round_trip(folder, tmp_path):
    stored = Trajectories(folder)
    assert len(stored) == 10 and stored.block_size == N
    shards = [f"shard-0000{i}.npz" for i in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *shards]
    for index, item in enumerate(stored):
        assert_equal(item, generation(index))
    assert_equal(stored[-1], generation(9))
    assert [item.data_id for item in stored[2:4]] == [102, 103]
    assert stored.ids.tolist() == [100 + i for i in range(10)]
    assert stored.prompt_lengths.tolist() == [len(generation(i).prompt) for i in range(10)]
    assert stored.block_counts.tolist() == [len(generation(i).iterates) for i in range(10)]
    with pytest.raises(IndexError):
        stored[10]
    write(tmp_path / "more", range(10, 12))
    both = Trajectories(folder, tmp_path / "more")
    assert len(both) == 12
    assert_equal(both[10], generation(10))


def test_a_block_knows_what_comes_before_it():
    item = next(g for g in map(generation, range(20)) if len(g.iterates) > 2)
    alone = item.alone(2)
    assert alone.prompt.tolist() == [*item.prompt, *item.iterates[0][-1], *item.iterates[1][-1]]
    assert alone.fixed.tolist() == [item.iterates[2][-1].tolist()] and alone.data_id == item.data_id


@pytest.mark.parametrize("moment", ["numpy.savez", "pathlib.Path.rename"])
def test_a_stopped_writer_goes_on_after_its_last_whole_shard(folder, monkeypatch, moment):
    """Stopped while a shard is written, or before it gets its name."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moment, killed)
        with pytest.raises(KeyboardInterrupt):
            write(folder, range(10, 17), settings={"seed": 3})
    assert len(Trajectories(folder)) == 10
    assert TrajectoryWriter(folder, block_size=N, settings={"seed": 3}).shards == 3
    write(folder, range(10, 17), settings={"seed": 3})
    for index, item in enumerate(Trajectories(folder)):
        assert_equal(item, generation(index))
    assert len(Trajectories(folder)) == 17


def test_refusals_of_the_writer(folder):
    with pytest.raises(TrajectoryError, match="was written with block_size 4, not 8"):
        TrajectoryWriter(folder, block_size=8, settings={"seed": 3})
    with pytest.raises(TrajectoryError, match="was written with settings"):
        TrajectoryWriter(folder, block_size=N, settings={"seed": 4})
    with pytest.raises(ValueError, match="shard_size must be at least 1, not 0"):
        TrajectoryWriter(folder, block_size=N, shard_size=0)
    writer = TrajectoryWriter(folder, block_size=N, settings={"seed": 3})
    with pytest.raises(ValueError, match="blocks must have 4 tokens, not 2"):
        writer.add(Generation(0, np.ones(1, np.int32), [np.ones((1, 2), np.int32)]))
    with pytest.raises(ValueError, match="generation 7 must have a prompt and at least one block"):
        Generation(7, np.ones(1, np.int32), [])


def damage(folder, how: str) -> None:
    index, shard = json.loads((folder / "index.json").read_text()), folder / "shard-00001.npz"
    data = bytearray(shard.read_bytes())
    if how == "cut":
        shard.write_bytes(data[:-8])
    elif how == "flipped":
        data[data.index(generation(4).iterates[0].tobytes())] ^= 1
        shard.write_bytes(data)
    elif how == "counts":
        with np.load(shard, allow_pickle=False) as file:
            columns = dict(file)
        np.savez(shard, **columns | {"iterate_counts": columns["iterate_counts"] + 1})
    elif how == "version":
        index["format_version"] = 9
    (folder / "index.json").write_text("{" if how == "json" else json.dumps(index))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "shard-00001.npz cannot be read"),
        ("flipped", "shard-00001.npz cannot be read"),
        ("counts", "shard-00001.npz is damaged"),
        ("version", "format version 9; this program reads 3"),
        ("json", "index.json is not JSON"),
    ],
)
def test_damaged_folders(folder, how, message):
    damage(folder, how)
    with pytest.raises(TrajectoryError, match=message) as caught:
        Trajectories(folder)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(TrajectoryError, match=r"holds no trajectories: it has no index\.json"):
        Trajectories(tmp_path)


# Noisy iterates

POINTS = np.array([[1, 9, 9, 9], [1, 2, 9, 9], [9, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 4]], np.int32)


def test_ratio_and_schedules():
    assert noise_ratio(POINTS).tolist() == [0.75, 0.5, 1.0, 0.25, 0.0]
    assert Selection(window=5).schedule.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert Selection(window=3, order="reverse").schedule.tolist() == [1, 0.5, 0]
    rng = np.random.default_rng(0)
    assert Selection(window=3).targets(5, rng).tolist() == [0, 0.5, 1, 0, 0.5]
    drawn = Selection(window=3, order="random").targets(100, rng)
    assert set(drawn) == {0, 0.5, 1} and drawn[:3].tolist() != [0, 0.5, 1]
    uniform = {Selection(order="uniform").choose(POINTS, np.nan, rng) for _ in range(100)}
    assert uniform == {0, 1, 2, 3}  # never the fixed point


def test_packing():
    item = Generation(0, np.ones(1, np.int32), [POINTS] * 2)
    found = pack(item, Selection(window=2), np.random.default_rng(0))
    assert found.chosen.tolist() == [4, 2]
    assert found.packed().tolist() == [1, 1, 2, 3, 4, 1, 2, 3, 4, 9, 2, 3, 9, 1, 2, 3, 4]


def test_filters():
    prompt = np.ones(3, np.int32)
    same, other = np.full((1, N), 5, np.int32), np.arange(N, dtype=np.int32)[None] + 2
    items = [
        Generation(0, prompt, [other]),
        Generation(1, prompt, [same, same, same]),
        Generation(2, prompt, [other]),
        Generation(0, np.ones(MAX_TOKENS - 2 * N + 1, np.int32), [other]),
    ]
    assert longest_run(np.array([3, 3, 1, 1, 1, 2])) == 3
    assert kept(items).tolist() == [0, 2]  # twelve equal tokens, and a prompt that is too long
    assert kept(items, stop=(5,)).tolist() == [0, 1, 2]  # what follows the stop token is not said
    assert kept(items, unique=True).tolist() == [0]


# Batches


def test_an_epoch_shows_every_generation(folder):
    stored = Trajectories(folder)
    buckets = [PairBucket(6, 2), PairBucket(6, 4)]
    make = pair_batches(stored, seed=1, batch_tokens=3 * 2 * (6 + 4 * N), buckets=buckets).make
    seen = []
    for index in range(make.epoch):
        bucket, examples, data = make.plan(index)[0], make.examples(index), make(index)
        assert data["noisy"].shape == (make.rows(bucket), bucket.pairs, N)
        assert data["prompt"].shape == (make.rows(bucket), bucket.prompt)
        for row, example in enumerate(examples):
            source = generation(example.data_id - 100)
            count = data["pairs"][row]
            np.testing.assert_array_equal(data["clean"][row, :count], source.fixed)
            np.testing.assert_array_equal(data["prompt"][row, : data["prompt_lengths"][row]], source.prompt)
            assert (bucket.pairs == 2) == (count <= 2)
            for block, noisy in zip(source.iterates, data["noisy"][row], strict=False):
                assert noisy.tolist() in block.tolist()
        seen += [example.data_id for example in examples]
    assert set(seen) == set(stored.ids.tolist())
    orders = [
        [e.data_id for i in range(make.epoch) for e in make.examples(k * make.epoch + i)] for k in (0, 1)
    ]
    assert orders[0] != orders[1]


def test_batches_say_where_their_padding_is():
    """By the length of the text, whatever token fills it up: here one that the text has too."""
    blocks = [np.full((2, N), 5, np.int32)] * 3
    item = Generation(0, np.ones(1, np.int32), blocks, 2 * N + 1)
    rng = np.random.default_rng(0)
    for example, pairs, ends in (
        (pack(item, Selection(), rng), 4, [4, 4, 1, 0]),
        (pack(item.alone(1), Selection(), rng), 1, [4]),
        (pack(item.alone(2), Selection(), rng), 1, [1]),
    ):
        batch = collate([example], PairBucket(9, pairs))
        wanted = (np.arange(N) < np.asarray(ends)[:, None])[None]
        assert (batch["noisy_real"] == wanted).all() and (batch["clean_real"] == wanted).all()
    with pytest.raises(ValueError, match=r"length of generation 3 must be from 1 to 12, .* not 13"):
        Generation(3, np.ones(1, np.int32), blocks, 13)


def test_long_generations_are_left_out(folder):
    stored = Trajectories(folder)
    options = {"seed": 0, "batch_tokens": 256, "buckets": [PairBucket(6, 1), PairBucket(6, 2)]}
    dropping = pair_batches(stored, **options).make
    shown = {e.data_id for i in range(dropping.epoch) for e in dropping.examples(i)}
    assert shown == set(stored.ids[stored.block_counts <= 2].tolist()) < set(stored.ids.tolist())
    chosen = pair_batches(stored, seed=0, batch_tokens=256, indices=[2, 5]).make
    assert {e.data_id for i in range(chosen.epoch) for e in chosen.examples(i)} == {102, 105}


def test_single_blocks(folder):
    stored = Trajectories(folder)
    make = pair_batches(stored, seed=0, batch_tokens=512, unit="block").make
    assert len(make.items) == stored.block_counts.sum()
    data = make(0)
    assert data["noisy"].shape[1:] == (1, N) and (data["pairs"] == 1).all()
    assert Selection(window=3).targets(2, np.random.default_rng(0), first=4).tolist() == [0.5, 1]


def pairs(folder, **changes):
    return pair_batches(Trajectories(folder), **{"seed": 0, "batch_tokens": 256, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: pairs(folder, batch_tokens=4), "batch_tokens 4 cannot hold a row"),
        (lambda folder: pairs(folder, unit="word"), "unit must be one of generation, block"),
        (lambda folder: pairs(folder, buckets=[]), "at least one bucket"),
        (lambda folder: pairs(folder, buckets=[PairBucket(1, 1)], indices=[3]), "no trajectory fits"),
        (lambda folder: pairs(folder, indices=[10]), "indices must name generations from 0 to 9"),
        (lambda _: PairBucket(0, 1), "a bucket needs a prompt and pairs of at least 1"),
        (lambda _: collate([], PairBucket(1, 1)), "collate needs at least one example"),
        (lambda _: Selection(order="up"), "order must be one of linear"),
        (lambda _: Selection(window=0), "window must be at least 1"),
    ],
)
def test_refusals(folder, make, message):
    with pytest.raises(ValueError, match=message):
        make(folder)


@pytest.mark.parametrize("unit", ["generation", "block"])
def test_losses_read_the_batches(folder, unit):
    config = CAUSAL_PRESETS["test-causal"]
    network, spec = TransformerNetwork(config), TokenSpec(stop=(1,), pad=0)
    options = {"selection": Selection(order="uniform"), "batch_tokens": 256, "unit": unit, "prefetch": 0}
    data = next(pair_batches(Trajectories(folder), seed=0, **options))
    loss = (consistency_loss if unit == "generation" else cllm_loss)(network, spec)
    value, terms = jax.jit(loss)(init_params(config, jax.random.key(0)), None, data, jax.random.key(0))
    assert np.isfinite(float(value)) and float(terms["ar"]) > 1 and float(terms["consistency"]) > 0
