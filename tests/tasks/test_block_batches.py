"""Samples of block diffusion: what is labelled, filler, packing, batches by their number."""

import numpy as np
import pytest

from experiments.tasks import block_batches, build_tokenizer, chain_batches, denoising_spec, token_spec
from experiments.tasks.batches import Bucket
from experiments.tasks.block_batches import Sample, filled, pack
from experiments.tasks.chains import Followers
from experiments.tasks.words import problem

TOKENIZER = build_tokenizer(mask=True)
SPEC = denoising_spec(TOKENIZER)
BUCKETS = (Bucket(2, 2, 102), Bucket(3, 4, 161), Bucket(0, 0, 64, task="sums"))


def maker(**changes):
    arguments = {"seed": 5, "block": 8, "spec": SPEC, "batch_tokens": 1000, "buckets": BUCKETS}
    arguments |= {"mixture": ((0, (1.0, 1.0, 1.0)),)}
    return block_batches(TOKENIZER, **(arguments | changes)).make


def samples_of(batch):
    """(row, tokens, labelled) of each sample; the padding at the end of a row is none."""
    for row, (tokens, labelled, positions) in enumerate(
        zip(batch["tokens"], batch["labelled"], batch["positions"], strict=True)
    ):
        starts = np.flatnonzero(positions == 0)
        ends = [*starts[1:], len(positions)]
        for start, end in zip(starts, ends, strict=True):
            if end - start > 1:
                np.testing.assert_array_equal(positions[start:end], np.arange(end - start))
                yield row, tokens[start:end].tolist(), labelled[start:end].tolist()


def test_the_mask_comes_after_all_other_tokens():
    plain = build_tokenizer()
    assert TOKENIZER.vocab_size == plain.vocab_size + 1 == SPEC.mask + 1
    text = problem(0, 0, "train", 4).prompt
    assert TOKENIZER.encode(text) == plain.encode(text)
    assert TOKENIZER.encode("<|mask|>") == [SPEC.mask] and TOKENIZER.decode([SPEC.mask]) == "<|mask|>"
    assert (SPEC.bos, SPEC.stop, SPEC.pad) == (1, (2,), 0) and SPEC.alignment == "own"
    assert denoising_spec(TOKENIZER, "next").alignment == "next" and token_spec().mask is None


def test_filler_is_labelled_and_ends_the_block():
    assert filled([1, 5], [6, 7, 2], 4, 0) == Sample([1, 5, 6, 7, 2, 0, 0, 0], [False] * 2 + [True] * 6)
    assert filled([1], [6, 7, 2], 4, 0) == Sample([1, 6, 7, 2], [False, True, True, True])


def test_the_longest_goes_first_into_the_first_row_with_room():
    def sample(size, token):
        return Sample([token] * size, [True] * size)

    batch = pack([sample(4, 1), sample(8, 2), sample(12, 3), sample(4, 4), sample(16, 5)], 2, 16, 0)
    assert batch["tokens"].tolist() == [[5] * 16, [3] * 12 + [1] * 4]
    batch = pack([sample(4, 1), sample(8, 2)], 2, 16, 9)
    assert batch["tokens"].tolist() == [[2] * 8 + [1] * 4 + [9] * 4, [9] * 16]
    assert batch["positions"].tolist()[0] == [*range(8), *range(4), 0, 0, 0, 0]
    assert batch["labelled"].sum() == 12


@pytest.mark.parametrize("length", [None, 192])
def test_rows_hold_problems_with_labelled_answers(length):
    make, problems = maker(length=length), 0
    for index in range(6):
        batch = make(index)
        assert batch["tokens"].shape[1] % 8 == 0 if length is None else batch["tokens"].shape == (5, 192)
        for _, tokens, labelled in samples_of(batch):
            assert len(tokens) % 8 == 0
            if tokens[-1] == SPEC.pad and SPEC.stop[0] not in tokens:
                continue  # practice
            if SPEC.stop[0] in tokens:
                problems += 1
                start = labelled.index(True)
                assert labelled == [False] * start + [True] * (len(tokens) - start)
                assert TOKENIZER.decode(tokens[1:start]).endswith("Answer:\n") and tokens[0] == SPEC.bos
                stop = tokens.index(SPEC.stop[0])
                assert TOKENIZER.decode(tokens[start:stop]).splitlines()[-1].startswith("####")
                assert tokens[stop + 1 :] == [SPEC.pad] * (len(tokens) - stop - 1) and len(tokens) - stop <= 8
    assert problems > 20


def test_packed_rows_are_fuller_and_mix_buckets():
    plain, packed = maker(batch_tokens=2000), maker(batch_tokens=2000, length=400)
    shares = [np.mean([np.mean(make(i)["positions"] > 0) for i in range(8)]) for make in (plain, packed)]
    assert 0.85 < shares[1] > shares[0], shares
    sizes = {len(tokens) for _, tokens, _ in samples_of(packed(0))}
    assert len(sizes) > 2


@pytest.mark.slow
def test_practice_is_labelled_in_its_spans():
    make = maker(mixture=((0, (0.0, 0.0, 1.0)),))
    batch = make(0)
    assert batch["tokens"].shape == (15, 72)
    assert 0.05 < batch["labelled"].mean() < 0.5 and not batch["labelled"][:, 64:].any()
    tokens, labelled = batch["tokens"][0], batch["labelled"][0]
    pieces = [TOKENIZER.decode([token]).strip() for token in tokens[labelled]]
    assert sum(piece.isdigit() for piece in pieces) >= len(pieces) / 2 and not set("+-*/=") & set(pieces)


def test_texts_of_a_chain():
    law = Followers(symbols=5, length=12, seed=2)
    data = chain_batches(law, seed=1, rows=3, prompt=4, prefetch=0)
    first, second = next(data), next(data)
    for batch in (first, second):
        assert law.lawful(batch["tokens"]).all() and batch["tokens"].shape == (3, 12)
        assert batch["labelled"].tolist() == [[False] * 4 + [True] * 8] * 3
        assert batch["positions"].tolist() == [list(range(12))] * 3
    assert (first["tokens"] != second["tokens"]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: maker(block=0), "block must be at least 1, not 0"),
        (lambda: maker(block=65), "block 65 is longer than the rows of a bucket of 64"),
        (lambda: maker(length=168), "length of packed rows must be from 169"),
        (lambda: maker(length=1001), "to batch_tokens 1000, not 1001"),
        (lambda: chain_batches(Followers(), seed=0, rows=0, prompt=8), "at least one row"),
        (lambda: chain_batches(Followers(), seed=0, rows=1, prompt=32), "a prompt shorter than a text of 32"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
