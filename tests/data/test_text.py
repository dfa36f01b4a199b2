"""Text as batches: characters, splits, windows, packing, and a state that knows its text."""

import json

import numpy as np
import pytest
import tokenizers

from paradec_jax.data.text import (
    WindowMaker,
    character_spec,
    character_tokenizer,
    documents,
    read_text,
    windows,
)
from paradec_jax.text.tokenizer import Tokenizer

TEXT = "To be, or not to be:\nthat is the question.\n" * 30


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_characters_come_back_and_others_are_the_mask():
    tokenizer = character_tokenizer(TEXT)
    count = len(set(TEXT))
    assert tokenizer.vocab_size == count + 1
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and len(ids) == len(TEXT) and max(ids) == count - 1
    assert sorted(set(TEXT)) == [tokenizer.decode([i]) for i in range(count)]
    assert tokenizer.encode("be Z\u00e9") == [*tokenizer.encode("be "), count, count]
    own, following = character_spec(tokenizer, "own"), character_spec(tokenizer, "next")
    assert (own.mask, own.alignment, own.stop) == (count, "own", ())
    assert (following.bos, following.mask, following.alignment) == (count, None, "next")


def test_the_end_is_held_out(path):
    text, tokenizer = read_text(path, held_out=0.25)
    assert [len(side) for side in (text.train, text.held_out)] == [1, 1]
    cut = int(len(TEXT) * 0.75)
    assert (
        tokenizer.decode(text.train[0]) == TEXT[:cut]
        and tokenizer.decode(text.held_out[0]) == TEXT[cut:]
    )
    assert read_text(path, held_out=0.2)[0].digest != text.digest
    assert read_text(path, tokenizer, 0.25)[0].digest == text.digest
    other = character_tokenizer(TEXT + "Z")
    assert read_text(path, other, 0.25)[0].digest != text.digest


def test_documents(tmp_path):
    parts = ["one", "two three", "four"]
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("<|endoftext|>".join([*parts, " \n"]))
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in parts) + "\n")
    assert documents(plain) == documents(lines) == parts
    text, tokenizer = read_text(lines, held_out=0.4)
    assert [tokenizer.decode(ids) for ids in text.train] == ["one"]
    assert [tokenizer.decode(ids) for ids in text.held_out] == ["two three", "four"]


def test_any_tokenizer(path):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"be": 0, "to": 1, "?": 2}, unk_token="?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    text, tokenizer = read_text(path, Tokenizer(backend))
    assert set(text.train[0]) == {0, 1, 2} and tokenizer.vocab_size == 3


def test_windows_are_batches_by_number(path):
    text, tokenizer = read_text(path)
    make = WindowMaker(text.train[0], 5, 4, 16)
    batch = make(3)
    assert batch["tokens"].shape == (4, 16) and (batch["weights"] == 1).all()
    assert all(tokenizer.decode(row) in TEXT for row in batch["tokens"])
    np.testing.assert_array_equal(make(3)["tokens"], batch["tokens"])
    assert not np.array_equal(make(4)["tokens"], batch["tokens"])
    assert not np.array_equal(WindowMaker(text.train[0], 6, 4, 16)(3)["tokens"], batch["tokens"])
    after = WindowMaker(text.train[0], 5, 4, 16, bos=99)(3)
    np.testing.assert_array_equal(after["targets"], batch["tokens"])
    assert (after["tokens"][:, 0] == 99).all()
    np.testing.assert_array_equal(after["tokens"][:, 1:], batch["tokens"][:, :-1])
    whole = WindowMaker(text.train[0], 0, 3, len(text.train[0]))(0)["tokens"]
    np.testing.assert_array_equal(whole, np.stack([text.train[0]] * 3))


def test_held_out_windows():
    ids = np.arange(23, dtype=np.int32)
    np.testing.assert_array_equal(windows(ids, 5), np.arange(20).reshape(4, 5))
    np.testing.assert_array_equal(windows(ids, 5, 2)[:, 0], [0, 10])
    for length, count in ((24, None), (5, 5)):
        with pytest.raises(ValueError, match="windows of"):
            windows(ids, length, count)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "no text at"),
        ("empty.txt", b" \n", "holds no text"),
        ("bad.jsonl", b'{"text": "fine"}\n{"words": 3}\n', 'line 2 of .* lacks "text"'),
        ("bytes.txt", b"fine \xff", "bytes.txt is not a text in UTF-8"),
        ("bytes.jsonl", b'{"text": "fine"}\n{"text": "\xff"}', "line 2 of .* is not UTF-8"),
    ],
)
def test_files_that_hold_no_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        documents(tmp_path / name)


def test_numbers_out_of_range(path):
    text, _ = read_text(path)
    for make in (
        lambda: read_text(path, held_out=1.0),
        lambda: read_text(path, held_out=0.9999),
        lambda: WindowMaker(text.train[0], 0, 0, 8),
        lambda: WindowMaker(text.train[0], 0, 1, 10**9),
    ):
        with pytest.raises(ValueError):
            make()
