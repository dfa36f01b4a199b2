"""Rules of a tokenizer.json that cost too much, fail, or cut and pad: refused, told or switched off."""

import json

import pytest

from paradec_jax.tokenizer import Tokenizer
from paradec_jax.tokenizer_rules import costly

FIELDS = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 7}, "unk_token": "?"},
}
# Patterns of GPT-2, Llama 3 and Qwen2, GPT-4o, DeepSeek, Bloom, Falcon, Kimi and EXAONE.
TAILS = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
RELEASED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + TAILS,
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t)?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t)?"
    + TAILS,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+" + TAILS,
    " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "[0-9][0-9][0-9]",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?" + TAILS,
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+" + TAILS,
    r"\d{1,3}(?=(?:\d{3})*\b)",
    "",
]


def write(path, **fields):
    (path / "tokenizer.json").write_text(json.dumps(FIELDS | fields))
    return path / "tokenizer.json"


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("pattern", RELEASED)
def test_patterns_of_releases_are_taken(pattern, tmp_path):
    assert costly(pattern) is None
    assert Tokenizer.from_file(write(tmp_path, pre_tokenizer=split(pattern))).encode("a") == [0]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a+)+$", "power"),
        ("a*a*[bc]c", "power 3"),
        ("(?:a*a*[bc]c)?x?", "power 3"),
        (".*a.*a.*b", "power 4"),
        ("a{0,9999}a{0,9999}b", "power 3"),
        ("a?" * 30 + "a" * 30, "too many choices"),
        (r"(a)\1", "refers back"),
        (r"(?<x>a\g<x>b)", "refers back"),
        ("(" * 100_000, "more than 10000"),
        ("(" * 9_000, "nested too deep"),
    ],
    ids=lambda value: value[:20],
)
def test_patterns_that_may_take_for_ever(pattern, reason, tmp_path):
    assert reason in costly(pattern)
    with pytest.raises(ValueError, match=r"tokenizer\.json that can be read: its pattern .*" + reason):
        Tokenizer.from_file(write(tmp_path, pre_tokenizer=split(pattern)))


def test_padding_and_truncation_are_off(tmp_path):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": 4, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "a"}
    tokenizer = Tokenizer.from_file(write(tmp_path, truncation=truncation, padding=padding))
    assert tokenizer.encode("a b a") == [0, 1, 0] and tokenizer.encode_batch(["a b", "a"]) == [[0, 1], [0]]
    tokenizer.save(tmp_path / "again.json")
    saved = json.loads((tmp_path / "again.json").read_text())
    assert saved["padding"] is saved["truncation"] is None


def test_size_is_that_of_the_highest_id(tmp_path):
    assert Tokenizer.from_file(write(tmp_path)).vocab_size == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"padding": {"strategy": {"Fixed": 10**10}}}, "pads to 10000000000 tokens"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}},
            "the tokenizer fails: range end",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}},
            "index out of bounds",
        ),
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}},
            "words of up to 1000000000 letters",
        ),
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 65}},
            "its normalizer makes up to 65 letters of one",
        ),
    ],
)
def test_rules_that_fail_are_told_in_one_place(fields, message, tmp_path, capfd):
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_file(write(tmp_path, **fields))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # where Rust reports its panics


def test_a_text_that_the_rules_fail_on(tmp_path, capfd):
    """Alternatives that overlap: the engine gives up, and its report of that is not shown."""
    tokenizer = Tokenizer.from_file(write(tmp_path, pre_tokenizer=split("(a|aa)+$")))
    assert tokenizer.encode("b") == [1]
    with pytest.raises(ValueError, match=r"the tokenizer fails: .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")
    assert capfd.readouterr().err == ""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}
    small = Tokenizer.from_file(write(tmp_path, model=model))
    assert small.encode("a") == [0]
    with pytest.raises(ValueError, match=r"the tokenizer fails: .*Missing \[UNK\]"):
        small.encode("b")
    with pytest.raises(ValueError, match="no text in Unicode"):
        small.encode("a \ud800")
