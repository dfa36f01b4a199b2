"""The tokenizer: lossless, byte-complete, streamed without a character cut in two."""

import json
import pickle
import re

import numpy as np
import pytest

from experiments.tasks import vocabulary
from experiments.tasks import words as wp
from paradec_jax.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "  two  spaces\tand\r\n\n lines ",
    "Ana has 1234 apples; Anatomy of café — naïve 日本語 👩‍👩‍👧 \u0301\u200b\u00a0\u3000\x00\x7f",
    "#### 61",
    "supercalifragilisticexpialidocious" * 20,
    "��",
]


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.build_tokenizer()


def random_text(rng, length):
    """Characters of every plane, surrogates left out, among ASCII."""
    high = rng.integers(0, 0x110000 - 0x800, length)
    points = np.where(rng.random(length) < 0.5, rng.integers(0, 128, length), high)
    return "".join(chr(p if p < 0xD800 else p + 0x800) for p in points.tolist())


def every_text():
    rng = np.random.default_rng(0)
    return TEXTS + [random_text(rng, 50) for _ in range(200)]


def test_round_trip_is_lossless_without_specials(tokenizer):
    for text, ids in zip(every_text(), tokenizer.encode_batch(every_text()), strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert all(3 <= i < tokenizer.vocab_size for i in ids)


def test_vocabulary(tokenizer):
    spec = vocabulary.token_spec()
    assert tokenizer.vocab_size <= 512
    assert [tokenizer.encode(token) for token in vocabulary.SPECIAL_TOKENS] == [[0], [1], [2]]
    assert (spec.pad, spec.bos, spec.stop) == (0, 1, (2,))
    assert tokenizer.encode("Ana<|eos|>")[1:] == [2]
    assert tokenizer.decode([1, *tokenizer.encode("Ana"), 2], skip_special=True) == "Ana"
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_a_word_or_digit_is_one_token(tokenizer):
    for steps in range(wp.MIN_STEPS, wp.MAX_STEPS + 1):
        for i in range(20):
            item = wp.problem(1, i, "tune", steps)
            text = item.prompt + item.solution
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert all(piece.strip().isalpha() or len(piece.strip()) <= 1 for piece in pieces)
            words = [word for word in re.findall(r"\w+", text) if word.isalpha()]
            assert [piece.strip() for piece in pieces if piece.strip().isalpha()] == words
    assert len(tokenizer.encode("7")) == len(tokenizer.encode(" 7")) == 1
    assert len(tokenizer.encode("37")) == len(tokenizer.encode(" 37")) == 2


def test_prompt_and_solution_split_at_a_token(tokenizer):
    item = wp.problem(0, 0, "train", 4)
    joined = tokenizer.encode(item.prompt + item.solution)
    assert joined == tokenizer.encode(item.prompt) + tokenizer.encode(item.solution)


def test_save_and_load(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    for copy in (Tokenizer.from_file(path), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.vocab_size == tokenizer.vocab_size
        assert copy.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


FIELDS = {
    "added_tokens": [],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 7}, "unk_token": "?"},
}
PANICS = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}


def write(path, **fields):
    (path / "tokenizer.json").write_text(json.dumps(FIELDS | fields))
    return path / "tokenizer.json"


def test_padding_and_truncation_are_off(tmp_path):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": 4, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "a"}
    tokenizer = Tokenizer.from_file(write(tmp_path, truncation=truncation, padding=padding))
    assert tokenizer.vocab_size == 8  # the highest id, and one
    assert tokenizer.encode("a b a") == [0, 1, 0] and tokenizer.encode_batch(["a b", "a"]) == [
        [0, 1],
        [0],
    ]
    tokenizer.save(tmp_path / "again.json")
    saved = json.loads((tmp_path / "again.json").read_text())
    assert saved["padding"] is saved["truncation"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF"),
        (b"\xff\xfe", ""),
        (json.dumps(FIELDS | {"model": {"type": "Oracle"}}).encode(), "variant"),
        (json.dumps(FIELDS | {"model": PANICS}).encode(), "range end"),
    ],
    ids=["empty", "bytes", "refused", "a panic"],
)
def test_a_file_that_cannot_be_read(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=f"{path} is not a tokenizer.json that can be read: .*{message}"
    ) as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer.from_file(tmp_path / "none.json")


def test_a_text_that_the_rules_fail_on(tmp_path):
    panics = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}}
    with pytest.raises(ValueError, match=r"tokenizer\.json fails: index out of bounds"):
        Tokenizer.from_file(write(tmp_path, **panics)).encode("a")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}
    small = Tokenizer.from_file(write(tmp_path, model=model))
    assert small.encode("a") == [0]
    with pytest.raises(ValueError, match=r"tokenizer\.json fails: .*Missing \[UNK\]"):
        small.encode("b")
    with pytest.raises(ValueError, match="no text in Unicode"):
        small.encode("a \ud800")
