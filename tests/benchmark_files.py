"""Benchmark files of a few items, in the forms of the released ones."""

import gzip
import json
import sys

import pytest

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")
SUMS = [
    {"question": " What is 2 + 3?", "answer": "It is 2 + 3 = <<2+3=5>>5.\n#### 5"},
    {"question": "What is 1,000 + 1?", "answer": "Add one.\n#### 1,001"},
    {"question": "What is 3 - 7?", "answer": "Below zero.\n#### -4"},
]
FUNCTIONS = [
    {
        "task_id": "Own/0",
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    },
    {
        "task_id": "Own/1",
        "prompt": 'def first(xs):\n    """The first of xs."""\n',
        "entry_point": "first",
        "canonical_solution": "    return xs[0]\n",
        "test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n",
    },
]


def task(number, setup=""):
    return {
        "task_id": number,
        "text": f"Write a function that adds {number}.",
        "code": f"def add(x):\r\n    return x + {number}",
        "test_setup_code": setup,
        "test_list": [f"assert add({i}) == {i + number}" for i in range(4)],
    }


# The setup of task 12 uses the candidate's code.
TASKS = [task(n) for n in (1, 2, 3, 4, 10, 11)] + [task(12, "y = add(0)"), task(510), task(511)]


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else text, encoding="utf-8")
    return path
