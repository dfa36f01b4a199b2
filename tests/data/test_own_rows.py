"""Batches by their number: iterators resume, and rows made without the others are those of the
whole batch.
"""

import itertools
import json

import numpy as np
import pytest

from experiments.tasks import build_tokenizer
from experiments.tasks.pointers import pointer_batches
from paradec_jax.data.endless import Endless, Part
from paradec_jax.data.pairs import Selection, pair_batches
from paradec_jax.data.text import WindowMaker
from paradec_jax.data.trajectories import Generation, Trajectories, append, claim


def pairs(folder):
    rng = np.random.default_rng(0)
    claim(folder, 4, {})
    for i in range(6):
        drafts = [rng.integers(2, 30, (3, 4)).astype(np.int32) for _ in range(1 + i % 3)]
        append(
            folder,
            [Generation(i, rng.integers(2, 30, 3).astype(np.int32), drafts, 4 * len(drafts))],
        )
    return pair_batches(
        Trajectories(folder),
        seed=1,
        batch_tokens=120,
        indices=np.arange(6),
        selection=Selection(),
        alone=False,
        multiple=1,
    ).make


MAKERS = {
    "windows": lambda _: WindowMaker(np.arange(100, dtype=np.int32), 5, 4, 16, bos=0),
    "pairs": pairs,
}


WHOLE = {  # makers of whole batches alone
    "pointers": lambda _: pointer_batches(build_tokenizer(), seed=2).make,
}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("name", MAKERS)
def test_a_part_is_cut_from_the_whole(name, tmp_path):
    make = MAKERS[name](tmp_path / "run")
    for index in range(5):
        batch = make(index)
        rows = len(next(iter(batch.values())))
        for pieces in (2, rows):
            cuts = np.linspace(0, rows, pieces + 1).astype(int).tolist()
            for first, last in itertools.pairwise(cuts):
                part = make.part(index, lambda count, cut=(first, last): cut)
                assert (part.first, part.count) == (first, rows)
                assert_same(part.rows, {key: x[first:last] for key, x in batch.items()})


@pytest.mark.parametrize("name", MAKERS | WHOLE)
def test_an_iterator_resumes_bitwise(name, tmp_path):
    make = (MAKERS | WHOLE)[name](tmp_path / "run")
    data, again = Endless(make, 2), Endless(make, 0)
    for _ in range(3):
        next(data)
    again.set_state(json.loads(json.dumps(data.get_state())))
    for index in (3, 4):
        batch = next(again)
        assert_same(batch, next(data))
        assert_same(batch, make(index))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_takes_a_part_where_it_stands(prefetch):
    make = WindowMaker(np.arange(100, dtype=np.int32), 5, 4, 16)
    data = Endless(make, prefetch, "digest")
    next(data)
    data.take(lambda count: (count // 2, count))
    part, place = next(data), data.get_state()
    assert isinstance(part, Part)
    assert_same(part.rows, {key: x[2:] for key, x in make(1).items()})
    later = next(data)
    data.set_state(place)
    assert_same(next(data).rows, later.rows)
    with pytest.raises(ValueError, match="begun with another text, tokenizer or split"):
        Endless(make, prefetch, "another").set_state(place)


def test_what_makes_no_parts_gives_whole_batches():
    data = Endless(lambda index: {"tokens": np.full((4, 2), index)}, 0)
    data.take(lambda count: (0, 1))
    assert next(data)["tokens"].shape == (4, 2)
