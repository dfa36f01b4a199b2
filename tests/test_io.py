"""Files that appear whole or not at all, and files of others: JSON and JSON lines."""

import json
import os

import pytest

from paradec_jax.io import MOST_CHARACTERS, atomic_write_text, json_lines, one_sentence, read_object

# What `str.splitlines` takes for the end of a line, but JSON lines and RFC 8259 do not; JSON
# escapes the ASCII ones.
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not valid JSON"),
        ("{", r"is not valid JSON \(Expecting"),
        ("9" * 5000, "is not valid JSON"),
        ("[1]", "must hold one JSON object"),
    ],
    ids=["lists", "open", "number", "list"],
)
def test_json_of_strangers(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {message}"):
        read_object(path)
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}')
    assert read_object(path) == {"a": "\ufeff"}


def test_a_sentence_is_one_line_of_some_letters():
    assert one_sentence(ValueError("a\nb\x1b[31m  c")) == "a b\N{REPLACEMENT CHARACTER}[31m c"
    text = one_sentence(ValueError("start " + "x" * 1000 + " end"))
    assert len(text) == MOST_CHARACTERS and text.startswith("start") and text.endswith("end")
    assert (
        one_sentence(MemoryError()) == "not enough memory"
        and one_sentence(KeyError()) == "KeyError"
    )


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
        (b"{", "is not JSON: Expecting property name"),
        (b'{"a": 1} {"a": 2}', "is not JSON: Extra data"),
        ('\u2028{"a": 1}'.encode(), "is not JSON: Expecting value"),
        (b"[1]", r"is \[1\], not an object"),
        (b"null", "is None, not an object"),
        (b'{"a": "\xff"}', "is not UTF-8: .*invalid start byte"),
        (b"[" * 100_000, "is not JSON: maximum recursion depth"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b"{}", 'lacks "a", which must be a string'),
        (b'{"a": 3}', 'lacks "a", which must be a string'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_json_lines_that_are_wrong(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"^line 3 of {path} {message}"):
        list(json_lines(path, "a"))
