"""MATH-500: its file, how it is asked, and its judge, which is an extra."""

import sys
import types

import pytest
from benchmark_files import write

from paradec_jax.evaluate.benchmarks import BENCHMARKS, Item, math500
from paradec_jax.evaluate.benchmarks.instruct import INSTRUCT

ROWS = [
    {"problem": "What is $1 + 1$?", "answer": "2", "unique_id": "test/sums/1"},
    {"problem": "x", "answer": "y"},
]


def test_items_of_a_file(tmp_path):
    path = write(tmp_path / "math.jsonl", ROWS)
    first, second = BENCHMARKS["math500"].read(path, shots=0, examples=None).items
    assert (first.id, second.id, first.reference) == ("test/sums/1", "math500/1", "2")
    assert first.prompt == "Problem: What is $1 + 1$?\nSolution:"
    assert INSTRUCT["math500"].message(first).startswith("What is $1 + 1$?\n\nReason step by step")
    assert INSTRUCT["math500"].message(first).endswith("\\boxed{}.")
    with pytest.raises(ValueError, match="shots must be 0 for math500"):
        math500.read(path, shots=1)
    with pytest.raises(ValueError, match="no solved examples"):
        math500.read(path, examples=path)
    with pytest.raises(ValueError, match='the field "answer" is missing'):
        math500.read(write(tmp_path / "other.jsonl", [{"problem": "x"}]))


def test_the_judge_is_asked(monkeypatch):
    """Both sides are parsed, the reference as a boxed answer; an answer without anything to read is wrong."""
    asked = []

    def parse(text):
        return [text.split("{")[1].split("}")[0]] if "boxed" in text else []

    def verify(gold, found):
        asked.append((gold, found))
        return gold == found

    monkeypatch.setitem(sys.modules, "math_verify", types.SimpleNamespace(parse=parse, verify=verify))
    item = Item("", "", (), "2")
    assert math500.score(item, "so it is \\boxed{2}") == math500.Answer(True, "2")
    assert math500.score(item, "so it is \\boxed{3}") == math500.Answer(False, "3")
    assert math500.score(item, "two") == math500.Answer(False, None) and asked[-1] == (["2"], [])


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"math-verify, which is missing: pip install -e '\.\[math\]'"):
        math500.score(Item("", "", (), "2"), "2")


def test_the_real_judge():
    pytest.importorskip("math_verify")
    half = Item("", "", (), "\\frac{1}{2}")
    assert math500.score(half, "The answer is \\boxed{0.5}.").equal
    assert not math500.score(half, "The answer is \\boxed{0.25}.").equal
