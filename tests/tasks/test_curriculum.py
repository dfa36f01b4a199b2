"""Rows of a curriculum: problems and practice, of which an assistant says what counts."""

import json
import re

import pytest

from experiments.tasks import curriculum, start
from experiments.tasks.auxiliary import auxiliary_task
from experiments.tasks.words import problem
from paradec_jax.data.jsonl import read_examples

WEIGHTS = (0.15, 0.2, 0.1, 0.05, 0.2, 0.3, 0.0)


@pytest.mark.parametrize(("index", "task"), [(1801, None), (1800, "steps"), (1809, "sums")])
def test_lines_fill_a_batch_and_say_what_counts(index, task, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = curriculum.Options("words", path, (index, index + 1), WEIGHTS)
    curriculum.main(options)
    bucket, rows = curriculum.bucket_of(options, index), list(map(json.loads, path.open()))
    model = start.begun(start.Options("test-causal", tmp_path))
    examples = read_examples(path, model, folder=tmp_path, length=512)
    count = 2048 // bucket.length
    assert bucket.task == task and len(rows) == len(examples) == count
    indices = iter(range(index * 80, (index + 1) * 80))
    for i, (row, (ids, counted)) in enumerate(zip(rows, examples, strict=True)):
        assert len(ids) <= bucket.length + 1
        told = model.tokenizer.decode(
            [id for id, one in zip(ids, counted, strict=True) if one][:-1]
        )
        if task is None:  # the next problem that fits
            drawn = (problem(0, number, "train", bucket[:2]) for number in indices)
            assert (row["prompt"], row["response"]) in ((one.prompt, one.solution) for one in drawn)
            assert told == row["response"]
        else:
            item = auxiliary_task(0, index * 20 + i, task)
            whole = "".join(message["content"] for message in row["messages"])
            assert (item.prompt + item.answer).startswith(whole)
            numbers = "".join(item.answer[low:high].strip() for low, high in item.spans)
            digits = re.sub(r"\D", "", told)  # a number's end, the token after it, counts too
            assert digits and numbers.startswith(digits)


def test_weights_are_one_a_kind_of_row(tmp_path):
    with pytest.raises(
        ValueError, match="weights must be 7 numbers, none negative and one positive"
    ):
        curriculum.Options("words", tmp_path, weights=(1.0, 1.0))


def test_pieces_of_a_text_are_the_text(tmp_path):
    (tmp_path / "text").write_text(whole := "".join(chr(97 + i % 26) for i in range(1000)))
    options = {"source": tmp_path / "text", "length": 64}
    pieces = {}
    for name, more in {"all": {}, "end": {"held_out": True}, "some": {"windows": 3}}.items():
        path = tmp_path / name
        curriculum.main(curriculum.Options("text", path, **options, **more))
        pieces[name] = [json.loads(line)["text"] for line in path.open()]
    assert "".join(pieces["all"] + pieces["end"]) == whole and len(pieces["all"]) == 15
    assert len(pieces["some"]) == 3 and {len(text) for text in pieces["some"]} == {64}
    assert all(text in whole for text in pieces["some"])
