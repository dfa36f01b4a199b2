"""Files that appear whole or not at all, and files of others: JSON and JSON lines."""

import json
import os

import pytest

from paradec_jax.io import (
    MOST_CHARACTERS,
    atomic_write_text,
    claimed,
    json_lines,
    one_sentence,
    read_object,
    string_in,
)

# What `str.splitlines` takes for the end of a line, but JSON lines and RFC 8259 do not; JSON escapes the ASCII ones.
SEPARATORS = "\x85\u2028\u2029"
ESCAPED = "\x0b\x0c\x1c\x1d\x1e"


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
        ("{", r"is not valid JSON \(Expecting"),
        ("9" * 5000, "is not valid JSON"),
        ("[1]", "must hold one JSON object"),
        (" " * 101 + "{}", "has 103 bytes, but a file of its kind has at most 100"),
    ],
    ids=["lists", "open", "number", "list", "long"],
)
def test_json_of_strangers(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json .*{message}|config\.json {message}"):
        read_object(path, 100 if text.startswith(" ") else 10**6)
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}')
    assert read_object(path) == {"a": "\ufeff"}


def test_a_sentence_is_one_line_of_some_letters():
    assert one_sentence(ValueError("a\nb\x1b[31m  c")) == "a b\N{REPLACEMENT CHARACTER}[31m c"
    told = one_sentence(ValueError("start " + "x" * 1000 + " end"))
    assert len(told) == MOST_CHARACTERS and told.startswith("start") and told.endswith("end")
    assert one_sentence(MemoryError()) == "not enough memory" and one_sentence(KeyError()) == "KeyError"


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "marked"])
def test_json_lines_end_at_line_feeds_alone(end, mark, tmp_path):
    texts = [f"one{letter}two" for letter in SEPARATORS + ESCAPED]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines[2:2] = ["", " \t"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + end.join(lines).encode())
    found = list(json_lines(path))
    assert [record["text"] for _, record in found] == texts
    assert [number for number, _ in found] == [1, 2, *range(5, len(lines) + 1)]


def test_json_lines_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{')
    lines = json_lines(str(path))
    assert next(lines) == (1, {"a": 1})
    with pytest.raises(ValueError, match="line 2 of"):
        next(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON: Expecting property name .* .character 2."),
        (b'{"a": 1} {"a": 2}', "is not JSON: Extra data .character 10."),
        ('\u2028{"a": 1}'.encode(), "is not JSON: Expecting value .character 1."),
        (b"[1]", "is a list, not an object"),
        (b"null", "is null, not an object"),
        (b'{"a": "\xff"}', "is not UTF-8: invalid start byte at byte 8 of the line"),
        (b"[" * 100_000, "is not JSON for us: it is nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON for us: Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_json_lines_that_are_wrong(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"^line 3 of {path} {message}"):
        list(json_lines(path))


def test_strings_in_json_lines():
    assert string_in({"text": "a\u2028b"}, "text", "line 3 of F") == "a\u2028b"
    with pytest.raises(ValueError, match=r'^line 3 of F lacks "text"$'):
        string_in({"words": "a"}, "text", "line 3 of F")
    for value, kind in ((3, "a number"), (None, "null"), ([], "a list"), (True, "a boolean")):
        with pytest.raises(ValueError, match=f'^line 3 of F: "text" must be a string, not {kind}$'):
            string_in({"text": value}, "text", "line 3 of F")
