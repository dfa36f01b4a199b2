"""Problems from files: answers, what is right, lines that are none, prompts as arrays."""

import json

import numpy as np
import pytest

from experiments.tasks import build_tokenizer, token_spec, word_problems
from experiments.tasks.files import write_problems
from paradec_jax.data.problems import (
    Problem,
    encode_prompts,
    exact_answers,
    extract_answer,
    read_problems,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 1 + 2 = 3.\n#### 3", 3),
        ("#### 3\n#### 12 apples", 12),
        ("####7", 7),
        ("#### $1,234.", 1234),
        ("#### -5", -5),
        ("#### 61.5", None),
        ("#### ", None),
        ("#### about 4", None),
        ("the answer is 4", None),
        ("#### " + "9" * 5000, None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_exact_answers():
    drawn = word_problems(50, seed=3, steps=(2, 2))
    texts = [item.solution for item in drawn]
    assert exact_answers(drawn, texts).all()
    assert exact_answers(drawn, ["", "#### x", *texts[2:]]).sum() == 48
    word = Problem("capital of France?", " Paris\n")  # without a number the whole text counts
    assert exact_answers([word] * 3, ["Paris", "Paris is", "#### 3"]).tolist() == [
        True,
        False,
        False,
    ]
    boxed = Problem("1/2?", r"so \boxed{\frac{1}{2}}.")
    texts = [
        r"\boxed{3} \boxed{ \frac{1}{2} }",
        r"\boxed{\frac{1}{2}} \boxed{2}",
        r"\boxed{\frac{1}",
        "1/2",
    ]
    assert exact_answers([boxed] * 4, texts).tolist() == [True, False, False, False]


def test_files(tmp_path):
    path, drawn = tmp_path / "problems.jsonl", word_problems(5, seed=3)
    write_problems(path, [*drawn, Problem("one\u2028two\x85", "a\u2028b\n#### 1")])
    assert read_problems(path) == [*drawn, Problem("one\u2028two\x85", "a\u2028b\n#### 1")]
    line = json.dumps(
        {"prompt": "one\u2028two", "answer": "a\n#### 1", "steps": 2}, ensure_ascii=False
    )
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n{line}".encode())
    assert read_problems(path) == [Problem("one\u2028two", "a\n#### 1", 2)] * 2
    asked = [{"role": "user", "content": "a"}]
    turns = {"messages": [*asked, {"role": "assistant", "content": "b"}]}
    tools = {"messages": asked, "tools": [1]}
    human = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    pairs = [
        ({"prompt": "a"}, ("a",)),
        ({"prompt": "a", "completion": "b"}, ("a", "b")),
        (turns, (asked, "b")),
    ]
    pairs += [({"messages": asked}, (asked,)), (tools, (tools,)), (human, (asked, "b"))]
    for line, problem in pairs:
        path.write_text(json.dumps(line))
        assert read_problems(path) == [Problem(*problem)]
    path.write_text(json.dumps({"id": 1, "prompt": "?", **turns}))
    with pytest.warns(UserWarning, match=r"the fields \['id', 'prompt'\] are passed over"):
        assert read_problems(path) == [Problem(asked, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not an object"),
        ('{"prompt": 1}', "prompt must be a list of objects .* or a string, .* not 1"),
        ('{"prompt": "a", "response": 1}', "or a string, as its answer, not 'a' and 1"),
        ('{"text": "a"}', '"text" must begin with a question'),
        (
            '{"prompt": "a"}',
            "has a prompt without an answer, and the first line has a prompt and an answer",
        ),
        ('{"prompt": "a", "answer": "#### b"}', "the answer lacks the number after"),
        ('{"messages": ["a"]}', "messages must be a list"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must begin with a question"),
        ('{"prompt": "a", "answer": "b", "steps": "2"}', "must be a whole number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "#### 1"}\n' + line)
    with pytest.raises(ValueError, match=f"line 2 of .*{message}"):
        read_problems(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no problem"):
        read_problems(path)


def test_encode_prompts():
    tokenizer, item = build_tokenizer(), word_problems(1)[0]
    tokens, lengths = encode_prompts(
        tokenizer, [item, "Ana has 3 apples."], spec=token_spec(), bucket=16
    )
    assert tokens.dtype == lengths.dtype == np.int32
    assert tokens.shape[1] % 16 == 0 and tokens.shape[1] - lengths.max() < 16
    assert tokens[0, : lengths[0]].tolist() == [1, *tokenizer.encode(item.prompt)]
    assert tokenizer.decode(tokens[1, 1 : lengths[1]]) == "Ana has 3 apples."
    assert not tokens[1, lengths[1] :].any()
    with pytest.raises(ValueError, match="at least one prompt"):
        encode_prompts(tokenizer, [], spec=token_spec())
