"""Files that appear whole or not at all."""

import os

import pytest

from paradec_jax.io import atomic_write_text


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
