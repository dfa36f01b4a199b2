"""Rows of a curriculum: read as lines they are those of the batches that they were drawn for."""

import json

import numpy as np
import pytest

from experiments.tasks import build_tokenizer, curriculum, start, word_problem_batches
from paradec_jax.data.jsonl import read_examples

WEIGHTS = (0.15, 0.2, 0.1, 0.05, 0.2, 0.3, 0.0)


@pytest.mark.parametrize(("index", "task"), [(1801, None), (1800, "steps"), (1809, "sums")])
def test_lines_are_rows_of_batches(index, task, tmp_path):
    mixture = {
        "buckets": curriculum.BUCKETS,
        "mixture": ((0, WEIGHTS),),
        "batch_tokens": 2048,
        "prefetch": 0,
    }
    make = word_problem_batches(build_tokenizer(), seed=0, **mixture).make
    assert make.bucket_of(index).task == task
    curriculum.main(
        curriculum.Options("words", tmp_path / "rows.jsonl", (index, index + 1), WEIGHTS)
    )
    model = start.begun(start.Options("test-causal", tmp_path))
    examples, batch = (
        read_examples(tmp_path / "rows.jsonl", model, folder=tmp_path, length=512),
        make(index),
    )
    assert len(examples) == len(batch["tokens"])
    for i, (tokens, targets, weights) in enumerate(zip(*batch.values(), strict=True)):
        ids, counted = examples[i]
        end = len(ids) - 1
        np.testing.assert_array_equal([tokens[:end], targets[:end]], [ids[:-1], ids[1:]])
        np.testing.assert_array_equal(weights, np.pad(counted[1:], (0, len(weights) - end)))


def test_pieces_of_a_text_are_the_text(tmp_path):
    (tmp_path / "text").write_text(whole := "".join(chr(97 + i % 26) for i in range(1000)))
    options = {"source": tmp_path / "text", "length": 64}
    curriculum.main(curriculum.Options("text", tmp_path / "all", **options))
    curriculum.main(curriculum.Options("text", tmp_path / "end", held_out=True, **options))
    curriculum.main(curriculum.Options("text", tmp_path / "some", windows=3, **options))
    pieces = {
        name: [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("all", "end", "some")
    }
    assert "".join(pieces["all"] + pieces["end"]) == whole and len(pieces["all"]) == 15
    assert len(pieces["some"]) == 3 and all(
        len(text) == 64 and text in whole for text in pieces["some"]
    )
