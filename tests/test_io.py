"""Files that appear whole or not at all."""

import os

import pytest

from paradec_jax.io import MOST_CHARACTERS, atomic_write_text, claimed, one_sentence, read_object


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "result.json"
    for text in ("first\n", "größer\n"):
        atomic_write_text(path, text)
        assert path.read_text(encoding="utf-8") == text and os.listdir(tmp_path) == [path.name]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    atomic_write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "new \ud800")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]


def test_leftovers_of_killed_writers_go_with_the_next_write(tmp_path):
    path = tmp_path / "result.json"
    (tmp_path / f".result.json.{'0' * 32}").write_text("half")
    kept = [".result.json.note", ".result.jsonl." + "0" * 32]
    for name in kept:
        (tmp_path / name).write_text("somebody else's")

    def make():
        living = tmp_path / f".result.json.{'1' * 32}"
        living.touch()
        return living

    with claimed(make) as living:  # a writer that lives
        atomic_write_text(path, "new")
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, living.name, path.name])
    atomic_write_text(path, "newer")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, path.name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("{", r"is not valid JSON \(Expecting"),
        ("9" * 5000, "is not valid JSON"),
        ("[1]", "must hold one JSON object"),
        (" " * 101 + "{}", "has 103 bytes, but a file of its kind has at most 100"),
    ],
    ids=["lists", "objects", "open", "number", "list", "long"],
)
def test_json_of_strangers(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json .*{message}|config\.json {message}"):
        read_object(path, 100 if text.startswith(" ") else 10**6)
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}


def test_a_sentence_is_one_line_of_some_letters():
    assert one_sentence(ValueError("a\nb\x1b[31m  c")) == "a b\N{REPLACEMENT CHARACTER}[31m c"
    told = one_sentence(ValueError("start " + "x" * 1000 + " end"))
    assert len(told) == MOST_CHARACTERS and told.startswith("start") and told.endswith("end")
    assert one_sentence(MemoryError()) == "not enough memory" and one_sentence(KeyError()) == "KeyError"
